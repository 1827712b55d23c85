"""Which token of a packed row attends to which: prompts causally, completions to their prompt and themselves.

A packed row is `[prompt 0 | completions of 0 ... | prompt 1 | completions of 1 ...]`. Linear layers see the row as
it is; attention sees it as two padded blocks, gathered by index.

Axes: `N` tokens of the row, `P` prompts, `L` tokens of the longest prompt, `G` completions of the largest group, `T`
tokens of the longest completion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefixLayout:
    """Index tensors that turn a packed row into attention blocks and back."""

    prompt_index_PL: Tensor
    """Row index of each prompt token; padding points at token 0."""
    prompt_valid_PL: Tensor
    """False where padding."""
    completion_index_PGT: Tensor
    """Row index of each completion token; padding points at token 0."""
    completion_valid_PGT: Tensor
    return_index_N: Tensor
    """Where each token of the row stands in the two blocks, flattened one after the other."""
    lengths: tuple[tuple[int, tuple[int, ...]], ...]
    """Tokens of each prompt, and of each of its completions."""

    @property
    def has_completions(self) -> bool:
        return self.completion_index_PGT.numel() > 0

    def to(self, device: torch.device) -> SharedPrefixLayout:
        moved = {
            field.name: value.to(device)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return SharedPrefixLayout(**moved, lengths=self.lengths)


def shared_prefix_layout(
    prompt_lengths: Sequence[int], completion_lengths: Sequence[Sequence[int]]
) -> SharedPrefixLayout:
    """The layout of a row that holds, for each prompt, its tokens and those of its completions."""
    prompt_P = torch.tensor(prompt_lengths)
    largest = max(map(len, completion_lengths), default=0)
    completion_PG = torch.tensor(
        [[*lengths, *[0] * (largest - len(lengths))] for lengths in completion_lengths], dtype=torch.long
    ).view(len(prompt_P), largest)
    tokens_P = prompt_P + completion_PG.sum(1)
    prompt_start_P = tokens_P.cumsum(0) - tokens_P
    completion_start_PG = (prompt_start_P + prompt_P)[:, None] + completion_PG.cumsum(1) - completion_PG
    prompt_index_PL, prompt_valid_PL = _padded(prompt_start_P, prompt_P)
    completion_index_PGT, completion_valid_PGT = _padded(completion_start_PG, completion_PG)
    return SharedPrefixLayout(
        prompt_index_PL=prompt_index_PL,
        prompt_valid_PL=prompt_valid_PL,
        completion_index_PGT=completion_index_PGT,
        completion_valid_PGT=completion_valid_PGT,
        return_index_N=_return_index(prompt_index_PL, prompt_valid_PL, completion_index_PGT, completion_valid_PGT),
        lengths=tuple(
            (prompt, tuple(lengths)) for prompt, lengths in zip(prompt_lengths, completion_lengths, strict=True)
        ),
    )


def _padded(start: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    """Row indices [..., longest] of runs of tokens, and where they are real."""
    longest = int(length.max()) if length.numel() else 0
    offset = torch.arange(longest)
    valid = offset < length[..., None]
    return torch.where(valid, start[..., None] + offset, 0), valid


def _return_index(prompt: Tensor, prompt_valid: Tensor, completion: Tensor, completion_valid: Tensor) -> Tensor:
    index = torch.cat([prompt.flatten(), completion.flatten()])
    valid = torch.cat([prompt_valid.flatten(), completion_valid.flatten()])
    slots = valid.nonzero()[:, 0]
    return torch.empty(len(slots), dtype=torch.long).scatter_(0, index[slots], slots)
