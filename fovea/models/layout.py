"""Which token of a packed row attends to which: prompts causally, completions to their prompt and themselves.

A packed row is `[prompt 0 | completions of 0 ... | prompt 1 | completions of 1 ...]`. Linear layers see the row as
it is; attention sees it as two padded blocks, gathered by index.

Axes: `N` tokens of the row, `P` prompts, `L` tokens of the longest prompt, `R` completions, `T` tokens of the
longest completion, `K` = L + T keys of a completion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefixLayout:
    """Index tensors that turn a packed row into attention blocks and back."""

    prompt_index_PL: Tensor
    """Row index of each prompt token; padding points at token 0."""
    completion_index_RT: Tensor
    """Row index of each completion token; padding points at token 0."""
    key_index_RK: Tensor
    """Row index of the keys of each completion: its prompt's tokens, then its own."""
    key_mask_R1TK: Tensor
    """True where a completion token may look."""
    return_index_N: Tensor
    """Where each token of the row stands in the two blocks, flattened one after the other."""

    def to(self, device: torch.device) -> SharedPrefixLayout:
        return SharedPrefixLayout(
            prompt_index_PL=self.prompt_index_PL.to(device),
            completion_index_RT=self.completion_index_RT.to(device),
            key_index_RK=self.key_index_RK.to(device),
            key_mask_R1TK=self.key_mask_R1TK.to(device),
            return_index_N=self.return_index_N.to(device),
        )


def shared_prefix_layout(
    prompt_lengths: Sequence[int], completion_lengths: Sequence[Sequence[int]], padding_tokens: int = 0
) -> SharedPrefixLayout:
    """The layout of a row that holds, for each prompt, its tokens and those of its completions.

    Padding at the end of the row is in neither block: it costs no attention, nobody attends to it, and it is given
    what the first token of the row got.
    """
    prompt_P = torch.tensor(prompt_lengths)
    completion_R = torch.tensor([n for lengths in completion_lengths for n in lengths], dtype=torch.long)
    prompt_of_R = torch.repeat_interleave(torch.tensor([len(lengths) for lengths in completion_lengths]))
    prompt_start_P, completion_start_R = _starts(prompt_P, completion_R, prompt_of_R)
    prompt_index_PL, prompt_valid_PL = _padded(prompt_start_P, prompt_P)
    completion_index_RT, completion_valid_RT = _padded(completion_start_R, completion_R)
    causal_TT = torch.ones(2 * completion_index_RT.shape[1:], dtype=torch.bool).tril()
    key_mask_RTK = torch.cat(
        [
            prompt_valid_PL[prompt_of_R, None].expand(-1, len(causal_TT), -1),
            causal_TT.expand(len(completion_R), -1, -1),
        ],
        dim=-1,
    )
    return_index_N = _return_index(prompt_index_PL, prompt_valid_PL, completion_index_RT, completion_valid_RT)
    return SharedPrefixLayout(
        prompt_index_PL=prompt_index_PL,
        completion_index_RT=completion_index_RT,
        key_index_RK=torch.cat([prompt_index_PL[prompt_of_R], completion_index_RT], dim=1),
        key_mask_R1TK=key_mask_RTK[:, None],
        return_index_N=torch.cat([return_index_N, return_index_N[:1].expand(padding_tokens)]),
    )


def _starts(prompt_P: Tensor, completion_R: Tensor, prompt_of_R: Tensor) -> tuple[Tensor, Tensor]:
    """Row index of the first token of every prompt and every completion."""
    tokens_P = prompt_P.index_add(0, prompt_of_R, completion_R)
    prompt_start_P = tokens_P.cumsum(0) - tokens_P
    # tokens before completion r = all earlier completions + all prompts up to and including its own
    completion_start_R = completion_R.cumsum(0) - completion_R + prompt_P.cumsum(0)[prompt_of_R]
    return prompt_start_P, completion_start_R


def _padded(start: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    """Row indices [X, longest] of runs of tokens, and where they are real."""
    longest = int(length.max()) if len(length) else 0
    offset = torch.arange(longest)
    valid = offset < length[:, None]
    return torch.where(valid, start[:, None] + offset, 0), valid


def _return_index(
    prompt_PL: Tensor, prompt_valid_PL: Tensor, completion_RT: Tensor, completion_valid_RT: Tensor
) -> Tensor:
    index = torch.cat([prompt_PL.flatten(), completion_RT.flatten()])
    valid = torch.cat([prompt_valid_PL.flatten(), completion_valid_RT.flatten()])
    slots = valid.nonzero()[:, 0]
    return torch.empty(len(slots), dtype=torch.long).scatter_(0, index[slots], slots)
