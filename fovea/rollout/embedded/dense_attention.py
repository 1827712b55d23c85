"""Attention of a decode step over the dense cache, as plain matrix products.

The keys of a prompt are read once for all of its completions. Attention to the prompt and attention to the completion's
own tokens are merged by their log-sum-exp, which equals one softmax over both.

Axes: `B` rows of the decode batch, `P` prompts, `G` completions of the largest group, `H` query heads, `J` key heads,
`Q` = H / J query heads of a key head, `Y` = G x Q, `D` width of a head, `L` tokens of the longest prompt,
`T` tokens of the longest completion, `X` rows of any kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fovea.models.transfer import to_device


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """Index tensors that group the rows of the batch by prompt."""

    row_PG: Tensor
    """Row indices of each prompt; padding points at row 0."""
    flat_index_B: Tensor
    """Index of each row in the flattened `row_PG`."""
    in_order: bool
    """The groups have one size and their rows are contiguous: a reshape replaces both index operations."""
    longest: int
    """Tokens of the longest prompt."""
    mask_P11L: Tensor | None
    """Additive mask, -inf beyond each prompt; None when all are equally long."""


def sharing(prompt_of_row: Sequence[int], prompt_lengths: Sequence[int], device: torch.device) -> Sharing:
    """Group rows by prompt; the rows may be in any order, as compaction leaves them."""
    prompt_B = torch.tensor(prompt_of_row)
    count_P = torch.bincount(prompt_B, minlength=len(prompt_lengths))
    order_B = prompt_B.argsort(stable=True)
    first_P = count_P.cumsum(0) - count_P
    rank_B = torch.empty_like(order_B)
    rank_B[order_B] = torch.arange(len(order_B)) - first_P[prompt_B[order_B]]
    row_PG = torch.zeros(len(prompt_lengths), int(count_P.max()), dtype=torch.long)
    row_PG[prompt_B, rank_B] = torch.arange(len(prompt_B))
    lengths_P = torch.tensor(prompt_lengths)
    longest = max(prompt_lengths)
    uneven = min(prompt_lengths) < longest
    return Sharing(
        row_PG=to_device(row_PG, device),
        flat_index_B=to_device(prompt_B * row_PG.shape[1] + rank_B, device),
        in_order=torch.equal(row_PG.flatten(), torch.arange(len(prompt_B))),
        longest=longest,
        mask_P11L=length_mask(to_device(lengths_P, device), longest) if uneven else None,
    )


def length_mask(lengths_X: Tensor, size: int) -> Tensor:
    """Additive mask [X, 1, 1, size]: -inf from each length on."""
    hidden = torch.arange(size, device=lengths_X.device) >= lengths_X[:, None]
    return torch.zeros(hidden.shape, device=lengths_X.device).masked_fill_(hidden, -torch.inf)[:, None, None]


class DenseAttention:
    """Attention of one decode step: a product per prompt for all its rows, and one per row for its own tokens."""

    def __init__(
        self,
        prompts: Sequence[Tensor],
        own: Sequence[Tensor],
        shared: Sharing,
        stored_B: Tensor,
        own_mask: Tensor | None,
        scale: float,
    ) -> None:
        """`prompts` [2, P, J, L, D] and `own` [2, B, J, T, D] hold the keys and values of each layer."""
        self._prompts, self._own, self._shared, self._scale = prompts, own, shared, scale
        self._stored_B, self._own_mask = stored_B, own_mask
        self._row_B = torch.arange(len(stored_B), device=stored_B.device)

    def __call__(self, layer: int, query_BHD: Tensor, key_BJD: Tensor, value_BJD: Tensor) -> Tensor:
        """Store the new keys and values, and attend; returns [B, H, D]."""
        keys_BJTD, values_BJTD = self._own[layer]
        self._write(keys_BJTD, key_BJD)
        self._write(values_BJTD, value_BJD)
        query_BJQD = (query_BHD * self._scale).unflatten(1, (key_BJD.shape[1], -1))
        own, own_lse = _attend(query_BJQD, keys_BJTD, values_BJTD, self._own_mask)
        query_PJYD = self._by_prompt(query_BJQD).transpose(1, 2).flatten(2, 3)
        keys_PJLD, values_PJLD = self._prompts[layer]
        shared, shared_lse = (
            self._by_row(x) for x in _attend(query_PJYD, keys_PJLD, values_PJLD, self._shared.mask_P11L)
        )
        # softmax over both = the average of both softmaxes, weighted by their sums of exponentials
        merged_BJQD = torch.lerp(shared, own, torch.sigmoid(own_lse - shared_lse))
        return merged_BJQD.flatten(1, 2).to(query_BHD.dtype)

    def _write(self, stored_BJTD: Tensor, new_BJD: Tensor) -> None:
        """Write this step's keys or values, one token per row."""
        if self._own_mask is None:
            # all running rows are equally long and write the last column; what finished rows write there is never read
            stored_BJTD[:, :, -1] = new_BJD
        else:
            stored_BJTD[self._row_B, :, self._stored_B] = new_BJD

    def _by_prompt(self, x_BJQD: Tensor) -> Tensor:
        """Group rows by prompt: [P, G, J, Q, D]."""
        if self._shared.in_order:
            return x_BJQD.reshape(*self._shared.row_PG.shape, *x_BJQD.shape[1:])
        return x_BJQD[self._shared.row_PG]

    def _by_row(self, x_PJYD: Tensor) -> Tensor:
        """Ungroup to rows: [B, J, Q, D]."""
        x_PGJQD = x_PJYD.unflatten(2, (self._shared.row_PG.shape[1], -1)).transpose(1, 2)
        rows: Tensor = x_PGJQD.flatten(0, 1)
        return rows if self._shared.in_order else rows[self._shared.flat_index_B]


def _attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attention output and the log-sum-exp of its scores, both in float32."""
    scores = (query @ keys.mT).float()
    if mask is not None:
        scores += mask
    # by hand: softmax and logsumexp would each compute the maximum and the exponentials
    peak = scores.amax(dim=-1, keepdim=True)
    weights = scores.sub_(peak).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    return (weights.to(values.dtype) @ values).float().div_(total), total.log_().add_(peak)
