"""Shared-prefix attention on CUDA: one call of torch's variable-length kernel for a whole row.

Every prompt and every completion is a segment of queries; the keys of a completion are its prompt's and then its own.
The kernel aligns a causal mask to the end of the keys, which is what a completion needs. Keys are gathered (a few KiB a
token) and their gradients summed by the gather's backward.

On CPU the segments run one by one through torch's SDPA: slow, and the way in which the index is tested. The kernel
itself has not run yet (docs/log.md).

Axes: `S` segments, `M` gathered keys of all segments; others as in `models.row_attention`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from fovea.models.layout import SharedPrefixLayout


def varlen_row_attention(
    query_NHD: Tensor, key_NJD: Tensor, value_NJD: Tensor, layout: SharedPrefixLayout, scale: float
) -> Tensor:
    """[N, H, D]"""
    segments = list(_segments(layout))
    index_M = torch.cat([torch.arange(*span) for _, spans in segments for span in spans]).to(query_NHD.device)
    key_MJD, value_MJD = key_NJD.index_select(0, index_M), value_NJD.index_select(0, index_M)
    queries_S = [queries for queries, _ in segments]
    keys_S = [sum(end - start for start, end in spans) for _, spans in segments]
    attend = _kernel if query_NHD.is_cuda else _one_by_one
    return attend(query_NHD, key_MJD, value_MJD, queries_S, keys_S, scale)


def _segments(layout: SharedPrefixLayout) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """Number of queries, and the spans of the row that are their keys, in the order of the row."""
    start = 0
    for prompt, completions in layout.lengths:
        span = (start, start + prompt)
        yield prompt, [span]
        start += prompt
        for length in completions:
            if length:
                yield length, [span, (start, start + length)]
            start += length


def _kernel(
    query_NHD: Tensor, key_MJD: Tensor, value_MJD: Tensor, queries_S: list[int], keys_S: list[int], scale: float
) -> Tensor:
    out = varlen_attn(
        query_NHD,
        key_MJD,
        value_MJD,
        _offsets(queries_S, query_NHD.device),
        _offsets(keys_S, query_NHD.device),
        max(queries_S),
        max(keys_S),
        scale=scale,
        window_size=(-1, 0),
        enable_gqa=query_NHD.shape[1] != key_MJD.shape[1],
    )
    assert isinstance(out, Tensor)
    return out


def _offsets(lengths: list[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def _one_by_one(
    query_NHD: Tensor, key_MJD: Tensor, value_MJD: Tensor, queries_S: list[int], keys_S: list[int], scale: float
) -> Tensor:
    parts = zip(query_NHD.split(queries_S), key_MJD.split(keys_S), value_MJD.split(keys_S), strict=True)
    return torch.cat([_segment(query, key, value, scale) for query, key, value in parts])


def _segment(query_NHD: Tensor, key_MJD: Tensor, value_MJD: Tensor, scale: float) -> Tensor:
    """Queries are the last tokens of the keys."""
    query, key, value = (x.transpose(0, 1)[None] for x in (query_NHD, key_MJD, value_MJD))
    queries, keys = query.shape[2], key.shape[2]
    mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)
