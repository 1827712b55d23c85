"""Tensors of packed rows and micro-batches, made from the assignment in `fovea.train.row_assignment`.

Axes: `N` tokens of a row, `A` actions of a row, `U` actions of its distinct completions, `L` tokens of a
prompt, `T` tokens of a completion.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fovea.models.families.base import ModelFamily
from fovea.models.shared_prefix.layout import PackedRow, shared_prefix_layout
from fovea.models.transfer import to_device
from fovea.train.row_assignment import CompletionTokens, RowSlices, distinct
from fovea.types import Prompt, PromptImage, Sample, SampleGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """A packed row and the per-action inputs of the loss, for one forward and backward pass."""

    row: PackedRow
    weights_A: Tensor
    """Weight of each action in the loss of the step."""
    rollout_logprobs_A: Tensor
    advantages_A: Tensor | None
    """None in a pass that computes log-probs or values only."""
    old_logprobs_A: Tensor | None
    reference_logprobs_A: Tensor | None
    masked_logprobs_A: Tensor | None
    values_A: Tensor | None
    returns_A: Tensor | None
    lengths: tuple[int, ...]
    """Number of actions of each sample, in the order of the row."""
    sample_numbers: tuple[int, ...]
    """Index of each of these samples in the batch."""
    groups: tuple[SampleGroup, ...]
    """Groups, or slices of groups, in the order of the row."""

    @property
    def given_logprobs(self) -> list[Tensor]:
        """Log-probs [A] that the micro-batch carries: the engine's, and the old and reference ones if there are any."""
        given = (self.rollout_logprobs_A, self.old_logprobs_A, self.reference_logprobs_A)
        return [logprobs_A for logprobs_A in (*given, self.masked_logprobs_A) if logprobs_A is not None]


def micro_batches(
    family: ModelFamily, rows: Sequence[RowSlices], like: Sample, device: torch.device
) -> list[MicroBatch]:
    """One micro-batch for each row; a row without samples (a dummy) gets the optional fields of the sample `like`."""
    return [_pack(family, row, like, device) for row in rows]


def _pack(family: ModelFamily, slices: RowSlices, like: Sample, device: torch.device) -> MicroBatch:
    groups = [each.group for each in slices]
    samples = [sample for group in groups for sample in group.samples]
    lengths = [sample.num_actions for sample in samples]
    # select once per field, not once per sample and field, which would dominate Python's time in a step
    is_action_N = np.concatenate([_NO_MASK, *(sample.mask_T for sample in samples)])

    def joined(field: Field) -> Tensor | None:
        return _joined(samples, field, like, is_action_N, device)

    return MicroBatch(
        row=pack_conversations(
            family,
            [group.prompt for group in groups],
            [group.samples for group in groups],
            device,
        ),
        weights_A=_tensor(np.repeat(np.array([s.weight for s in samples], dtype=np.float32), lengths), device),
        rollout_logprobs_A=_tensor(
            np.concatenate([_NONE, *(sample.rollout_logprobs_T for sample in samples)])[is_action_N], device
        ),
        advantages_A=joined(lambda sample: sample.advantages_T),
        old_logprobs_A=joined(lambda sample: sample.old_logprobs_T),
        reference_logprobs_A=joined(lambda sample: sample.reference_logprobs_T),
        masked_logprobs_A=joined(lambda sample: sample.masked_logprobs_T),
        values_A=joined(lambda sample: sample.values_T),
        returns_A=joined(lambda sample: sample.returns_T),
        lengths=tuple(lengths),
        sample_numbers=tuple(number for each in slices for number in each.sample_numbers),
        groups=tuple(groups),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Continuation:
    """Tokens after a prompt that belong to no sample: actions of the policy and observations of the environment."""

    token_ids_T: NDArray[np.int64]
    mask_T: NDArray[np.bool_]
    """True at actions, whose log-probs are computed."""
    images: tuple[PromptImage, ...] = ()


def pack_row(
    family: ModelFamily,
    prompts: Sequence[Prompt],
    completions: Sequence[Sequence[NDArray[np.int64]]],
    device: torch.device,
) -> PackedRow:
    """Packed row of prompts and completions of one turn, in which every completion token is an action."""
    continuations = [
        [Continuation(token_ids_T=ids_T, mask_T=np.ones(len(ids_T), dtype=np.bool_)) for ids_T in of_prompt]
        for of_prompt in completions
    ]
    return pack_conversations(family, prompts, continuations, device)


def pack_conversations(
    family: ModelFamily,
    prompts: Sequence[Prompt],
    continuations: Sequence[Sequence[CompletionTokens]],
    device: torch.device,
) -> PackedRow:
    """Packed row of prompts, each followed by its distinct continuations."""
    unequal, computed_A = _unequal(continuations)
    tokens: list[NDArray[np.int64]] = []
    positions: list[NDArray[np.int64]] = []
    hidden_index: list[NDArray[np.int64]] = [_NO_IDS]
    images: list[PromptImage] = []
    start = 0
    for prompt, answers in zip(prompts, unequal, strict=True):
        tokens.append(prompt.token_ids_L)
        # every continuation starts at the position after the prompt, as if it were the only one
        prompt_3L, next_position = family.positions(prompt.token_ids_L, prompt.images, 0)
        positions.append(prompt_3L)
        images.extend(prompt.images)
        start += prompt.num_tokens
        last_of_prompt = start - 1
        for answer in answers:
            length = len(answer.token_ids_T) - 1  # the last token predicts nothing
            tokens.append(answer.token_ids_T[:-1])
            positions.append(family.positions(answer.token_ids_T[:-1], answer.images, next_position)[0])
            images.extend(answer.images)
            # the hidden state of a token predicts the next token; the first action is predicted by the prompt's last
            # token
            predictors_T = np.arange(start - 1, start + length)
            predictors_T[0] = last_of_prompt
            hidden_index.append(predictors_T)
            start += length
    layout = shared_prefix_layout(
        [prompt.num_tokens for prompt in prompts],
        [[len(answer.token_ids_T) - 1 for answer in answers] for answers in unequal],
    )
    not_sent = [image.key for image in images if not image.tensors]
    assert not not_sent, f"the pixels of {len(not_sent)} of {len(images)} images of a row are on another rank"
    of_row = [answer for answers in unequal for answer in answers]
    is_action_N = np.concatenate([_NO_MASK, *(answer.mask_T for answer in of_row)])
    token_ids_N, hidden_index_U = np.concatenate(tokens), np.concatenate(hidden_index)[is_action_N]
    predictor_index_M, predictor_U = np.unique(hidden_index_U, return_inverse=True)
    return PackedRow(
        token_ids_N=_tensor(token_ids_N, device),
        positions_3N=_tensor(np.concatenate(positions, axis=1), device),
        layout=layout.to(device),
        images=tuple(images),
        hidden_index_U=_tensor(hidden_index_U, device),
        visual_index_V=_tensor(np.flatnonzero(token_ids_N == family.image_token_id), device),
        predictor_index_M=_tensor(predictor_index_M, device),
        predictor_U=_tensor(predictor_U, device),
        target_ids_U=_tensor(
            np.concatenate([_NO_IDS, *(answer.token_ids_T for answer in of_row)])[is_action_N], device
        ),
        computed_A=_tensor(computed_A, device),
    )


def _unequal(
    continuations: Sequence[Sequence[CompletionTokens]],
) -> tuple[list[list[CompletionTokens]], NDArray[np.int64]]:
    """The distinct continuations of each prompt, and the index of every action among the actions of these."""
    unequal: list[list[CompletionTokens]] = []
    computed: list[NDArray[np.int64]] = [_NO_IDS]
    start = 0
    for answers in continuations:
        firsts, index = distinct(answers)
        starts = start + np.cumsum([0, *(int(each.mask_T.sum()) for each in firsts)])
        computed += [np.arange(starts[place], starts[place + 1]) for place in index]
        unequal.append(firsts)
        start = int(starts[-1])
    return unequal, np.concatenate(computed)


_NONE, _NO_IDS, _NO_MASK = np.zeros(0, dtype=np.float32), np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.bool_)
"""Empty first elements for `np.concatenate`, which raises on an empty list: a row may have no actions."""

Field = Callable[[Sample], "NDArray[np.float32] | None"]


def _joined(
    samples: Sequence[Sample], field: Field, like: Sample, is_action_N: NDArray[np.bool_], device: torch.device
) -> Tensor | None:
    """Per-token field of the samples at their actions, [A]; None if the samples of the batch lack the field."""
    arrays = [array_T for sample in samples if (array_T := field(sample)) is not None]
    given = field(like) is not None
    assert len(arrays) == given * len(samples), f"only {len(arrays)} of {len(samples)} samples have a per-token field"
    return _tensor(np.concatenate([_NONE, *arrays])[is_action_N], device) if given else None


def _tensor(array: NDArray[np.generic], device: torch.device) -> Tensor:
    return to_device(torch.from_numpy(array), device)
