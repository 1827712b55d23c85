"""Shared-prefix attention on CUDA: one call of torch's variable-length attention for a whole packed row.

Every prompt and every completion is a segment of queries; the keys of a completion are its prompt's and then its own.
On a CPU the segments run one by one through torch's SDPA, which is slow and serves to test the indices. The CUDA kernel
itself has not run yet (docs/log.md).

Axes: `S` segments, `M` gathered keys of all segments; others as in `models.shared_prefix.attention`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from fovea.models.shared_prefix.layout import SharedPrefixLayout


@dataclass(frozen=True, slots=True)
class VarlenAttention:
    """Attention function of one row for all layers, with its index tensors."""

    key_index_M: Tensor
    queries_S: Sequence[int]
    keys_S: Sequence[int]
    query_offsets: Tensor
    key_offsets: Tensor
    scale: float

    @staticmethod
    def of(layout: SharedPrefixLayout, scale: float) -> VarlenAttention:
        """The attention function of a row with this layout."""
        segments, device = list(_segments(layout)), layout.return_index_N.device
        queries_S = [queries for queries, _ in segments]
        keys_S = [sum(end - start for start, end in spans) for _, spans in segments]
        return VarlenAttention(
            key_index_M=torch.cat([torch.arange(*span) for _, spans in segments for span in spans]).to(device),
            queries_S=queries_S,
            keys_S=keys_S,
            query_offsets=_offsets(queries_S, device),
            key_offsets=_offsets(keys_S, device),
            scale=scale,
        )

    def __call__(self, query_NHD: Tensor, key_NJD: Tensor, value_NJD: Tensor) -> Tensor:
        """Attention [N, H, D] of a row."""
        # gathered, so that each segment's keys are contiguous (a few KiB a token); the backward pass of index_select
        # sums the gradients of a prompt's copies
        key_MJD, value_MJD = (x.index_select(0, self.key_index_M) for x in (key_NJD, value_NJD))
        attend = self._kernel if query_NHD.is_cuda else self._one_by_one
        return attend(query_NHD, key_MJD, value_MJD)

    def _kernel(self, query_NHD: Tensor, key_MJD: Tensor, value_MJD: Tensor) -> Tensor:
        out = varlen_attn(
            query_NHD,
            key_MJD,
            value_MJD,
            self.query_offsets,
            self.key_offsets,
            max(self.queries_S),
            max(self.keys_S),
            scale=self.scale,
            # causal: unlimited to the left, nothing to the right; the kernel aligns the ends of queries and keys, so
            # that a completion attends to its whole prompt
            window_size=(-1, 0),
            enable_gqa=query_NHD.shape[1] != key_MJD.shape[1],
        )
        assert isinstance(out, Tensor)
        return out

    def _one_by_one(self, query_NHD: Tensor, key_MJD: Tensor, value_MJD: Tensor) -> Tensor:
        queries, keys, values = (
            query_NHD.split(self.queries_S),
            key_MJD.split(self.keys_S),
            value_MJD.split(self.keys_S),
        )
        parts = zip(queries, keys, values, strict=True)
        return torch.cat([_segment(query, key, value, self.scale) for query, key, value in parts])


def _segments(layout: SharedPrefixLayout) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """Number of queries and (start, end) ranges of keys in the row, for each segment in the order of the row."""
    start = 0
    for prompt, completions in layout.lengths:
        span = (start, start + prompt)
        yield prompt, [span]
        start += prompt
        for length in completions:
            if length:
                yield length, [span, (start, start + length)]
            start += length


def _offsets(lengths: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def _segment(query_NHD: Tensor, key_MJD: Tensor, value_MJD: Tensor, scale: float) -> Tensor:
    """Causal attention of one segment, whose queries are the last of its keys' tokens."""
    query, key, value = (x.transpose(0, 1)[None] for x in (query_NHD, key_MJD, value_MJD))
    queries, keys = query.shape[2], key.shape[2]
    mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)
