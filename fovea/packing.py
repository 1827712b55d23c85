"""From samples to packed rows under a token budget; the split never changes the gradient.

Axes: `N` tokens of a row, `A` actions of a row, `L` tokens of a prompt, `T` tokens of a completion.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fovea.errors import TrainError
from fovea.models.layout import shared_prefix_layout
from fovea.models.row import PackedRow
from fovea.types import Prompt, Sample, SampleGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One forward and backward: a row, and what the objective needs of each action."""

    row: PackedRow
    rollout_logprobs_A: Tensor
    advantages_A: Tensor
    old_logprobs_A: Tensor | None
    reference_logprobs_A: Tensor | None
    lengths: tuple[int, ...]
    """Actions of each sample, in the order of the groups."""


def micro_batches(groups: Sequence[SampleGroup], max_tokens: int, device: torch.device) -> list[MicroBatch]:
    """Pack groups in their order, as many per row as `max_tokens` allows; a larger group is split by samples."""
    parts = [part for group in groups for part in _split(group, max_tokens)]
    rows: list[list[SampleGroup]] = []
    free = 0
    for part in parts:
        size = num_tokens(part)
        if not rows or size > free:
            rows.append([])
            free = max_tokens
        rows[-1].append(part)
        free -= size
    return [_pack(row, device) for row in rows]


def num_tokens(group: SampleGroup) -> int:
    """Tokens of a group in a row: the prompt once, and each completion without its last token."""
    return group.prompt.num_tokens + sum(len(sample.token_ids_T) - 1 for sample in group.samples)


def _split(group: SampleGroup, max_tokens: int) -> list[SampleGroup]:
    """The group itself, or parts of it that fit, each with the prompt repeated."""
    parts: list[list[Sample]] = [[]]
    size = group.prompt.num_tokens
    for sample in group.samples:
        tokens = len(sample.token_ids_T) - 1
        if group.prompt.num_tokens + tokens > max_tokens:
            raise TrainError(
                f"a prompt of {group.prompt.num_tokens} tokens with a completion of {tokens + 1} does not fit "
                f"train.max_tokens_per_microbatch={max_tokens}; set it to at least "
                f"{group.prompt.num_tokens + tokens}, or lower rollout.max_new_tokens"
            )
        if parts[-1] and size + tokens > max_tokens:
            parts.append([])
            size = group.prompt.num_tokens
        parts[-1].append(sample)
        size += tokens
    return [replace(group, samples=tuple(part)) for part in parts]


def _pack(groups: Sequence[SampleGroup], device: torch.device) -> MicroBatch:
    samples = [sample for group in groups for sample in group.samples]
    return MicroBatch(
        row=pack_row(
            [group.prompt for group in groups],
            [[sample.token_ids_T for sample in group.samples] for group in groups],
            device,
        ),
        rollout_logprobs_A=_joined(samples, lambda sample: sample.rollout_logprobs_T, device),
        advantages_A=_joined(samples, lambda sample: sample.advantages_T, device),
        old_logprobs_A=_joined_if_present(samples, lambda sample: sample.old_logprobs_T, device),
        reference_logprobs_A=_joined_if_present(samples, lambda sample: sample.reference_logprobs_T, device),
        lengths=tuple(len(sample.token_ids_T) for sample in samples),
    )


def pack_row(
    prompts: Sequence[Prompt], completions: Sequence[Sequence[NDArray[np.int64]]], device: torch.device
) -> PackedRow:
    """The row of these prompts, each followed by its completions."""
    tokens: list[NDArray[np.int64]] = []
    positions: list[NDArray[np.int64]] = []
    hidden_index: list[NDArray[np.int64]] = []
    start = 0
    for prompt, answers in zip(prompts, completions, strict=True):
        tokens.append(prompt.token_ids_L)
        positions.append(prompt.positions_3L)
        start += prompt.num_tokens
        last_of_prompt = start - 1
        for answer in answers:
            length = len(answer) - 1
            tokens.append(answer[:-1])
            positions.append(np.broadcast_to(prompt.next_position + np.arange(length), (3, length)))
            hidden_index.append(np.concatenate([[last_of_prompt], np.arange(start, start + length)]))
            start += length
    layout = shared_prefix_layout(
        [prompt.num_tokens for prompt in prompts],
        [[len(answer) - 1 for answer in answers] for answers in completions],
    )
    return PackedRow(
        token_ids_N=_tensor(np.concatenate(tokens), device),
        positions_3N=_tensor(np.concatenate(positions, axis=1), device),
        layout=layout.to(device),
        images=tuple(image for prompt in prompts for image in prompt.images),
        hidden_index_A=_tensor(np.concatenate(hidden_index), device),
        target_ids_A=_tensor(np.concatenate([answer for answers in completions for answer in answers]), device),
    )


Field = Callable[[Sample], "NDArray[np.float32] | None"]


def _joined(samples: Sequence[Sample], field: Field, device: torch.device) -> Tensor:
    joined = _joined_if_present(samples, field, device)
    assert joined is not None, "a per-token field is missing"
    return joined


def _joined_if_present(samples: Sequence[Sample], field: Field, device: torch.device) -> Tensor | None:
    arrays = [array for sample in samples if (array := field(sample)) is not None]
    assert len(arrays) in (0, len(samples)), f"{len(arrays)} of {len(samples)} samples have a per-token field"
    return _tensor(np.concatenate(arrays), device) if arrays else None


def _tensor(array: NDArray[np.generic], device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)
