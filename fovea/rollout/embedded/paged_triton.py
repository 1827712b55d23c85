"""Paged attention of decode steps as a Triton kernel: any page size, 16 and 32 bits, any number of rows.

CUDA graphs can capture it. Its slow reference is `paged_cache.gathered_attention`.

Keys are split over programs. Each program handles the query heads that share its key head, so that a key is read once
for all of them (Dao et al., "Flash-Decoding", 2023); the results are merged by their log-sum-exp.

Axes: as in `paged_cache`; `G` query heads of a key head, `C` splits of the keys.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_TOKENS = 64
"""Number of keys that a program reads at once."""
MAX_SPLITS = 16
MIN_ROWS = 16
"""Rows of the smallest tensor core product; fewer query heads are padded to this number."""
FILLED_BY = 2
"""Number of programs that keep a multiprocessor busy."""


@triton.jit
def attend_to_split(  # noqa: PLR0913, PLR0917
    query,
    keys,
    values,
    table,
    used,
    parts,
    logs,
    scale,
    query_row,
    query_head,
    page_stride,
    token_stride,
    head_stride,
    table_row,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Attention of the G queries of a row over one split of its keys, and the log-sum-exp of the scores."""
    row, key_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    tokens = tl.load(used + row)
    # a split has whole blocks, so that no two splits read the same block; the last splits of a short row are empty
    share = tl.cdiv(tl.cdiv(tokens, BLOCK), SPLITS) * BLOCK
    start = split * share
    end = tl.minimum(start + share, tokens)
    group, width, block = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, BLOCK)
    is_query = group < GROUP
    places = query + row * query_row + (key_head * GROUP + group)[:, None] * query_head + width[None, :]
    query_GD = tl.load(places, mask=is_query[:, None], other=0.0)
    # online softmax: largest score, sum of exponentials and weighted sum of values so far
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, WIDTH], tl.float32)
    for first in range(start, end, BLOCK):
        token = first + block
        is_key = token < end
        # int64, since an offset in a large pool exceeds 2^31
        page = tl.load(table + row * table_row + token // PAGE, mask=is_key, other=0).to(tl.int64)
        place = page * page_stride + (token % PAGE) * token_stride + key_head * head_stride
        key_DB = tl.load(keys + place[None, :] + width[:, None], mask=is_key[None, :], other=0.0)
        # without "ieee", a float32 product would be computed in TF32
        score = tl.dot(query_GD, key_DB, input_precision="ieee") * scale
        score = tl.where(is_key[None, :], score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        weight = tl.exp(score - higher[:, None])
        # rescales the sums that were computed with the smaller maximum
        kept = tl.exp(top - higher)
        value_BD = tl.load(values + place[:, None] + width[None, :], mask=is_key[:, None], other=0.0)
        sums = sums * kept[:, None] + tl.dot(weight.to(value_BD.dtype), value_BD, input_precision="ieee")
        total, top = total * kept + tl.sum(weight, 1), higher
    at = (row * HEADS + key_head * GROUP + group) * SPLITS + split
    # an empty split gets weight exp(-inf) = 0 in the merge, and no 0 / 0, which would be NaN
    has_keys = total > 0
    tl.store(logs + at, tl.where(has_keys, top + tl.log(total), float("-inf")), mask=is_query)
    mean_GD = sums / tl.where(has_keys, total, 1.0)[:, None]
    tl.store(parts + at[:, None] * WIDTH + width[None, :], mean_GD, mask=is_query[:, None])


@triton.jit
def merge_splits(parts, logs, out, SPLITS: tl.constexpr, WIDTH: tl.constexpr):
    """Merge the splits of one query head of one row, weighted by the exponentials of their log-sum-exp."""
    head = tl.program_id(0)
    split, width = tl.arange(0, SPLITS), tl.arange(0, WIDTH)
    log = tl.load(logs + head * SPLITS + split)
    weight = tl.exp(log - tl.max(log, 0))
    part_CD = tl.load(parts + (head * SPLITS + split)[:, None] * WIDTH + width[None, :])
    # each part is a mean, weighted by its sum of exponentials relative to the largest
    mean_D = tl.sum(part_CD * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out + head * WIDTH + width, mean_D.to(out.dtype.element_ty))


def triton_attention(
    query_BHD: Tensor,
    keys: Tensor,
    values: Tensor,
    table_BX: Tensor,
    used_B: Tensor,
    scale: float,
    splits: int | None = None,
) -> Tensor:
    """Attention of one query per row, a `PagedKernel`; the head size must be a power of two and at least 16.

    `splits` is the number of splits of the keys, a power of two; by default as many as fill the device.
    """
    rows, heads, width = query_BHD.shape
    page_tokens, key_heads = keys.shape[1:3]
    assert keys.stride() == values.stride(), (keys.stride(), values.stride())
    query_BHD = query_BHD.contiguous()
    splits = splits or num_splits(rows, key_heads, table_BX.shape[1] * page_tokens, query_BHD.device)
    parts = query_BHD.new_empty(rows, heads, splits, width, dtype=torch.float32)
    logs = query_BHD.new_empty(rows, heads, splits, dtype=torch.float32)
    out = torch.empty_like(query_BHD)
    attend_to_split[(rows, key_heads, splits)](
        *(query_BHD, keys, values, table_BX, used_B, parts, logs, scale),
        *(*query_BHD.stride()[:2], *keys.stride()[:3], table_BX.stride(0)),
        **constants(heads, key_heads, width, page_tokens, splits),
    )
    merge_splits[(rows * heads,)](parts, logs, out, SPLITS=splits, WIDTH=width)
    return out


def constants(heads: int, key_heads: int, width: int, page_tokens: int, splits: int) -> dict[str, Any]:
    """Compile-time constants of `attend_to_split`."""
    group = heads // key_heads
    return {
        "HEADS": heads,
        "GROUP": group,
        "ROWS": max(MIN_ROWS, triton.next_power_of_2(group)),
        "WIDTH": width,
        "PAGE": page_tokens,
        "BLOCK": BLOCK_TOKENS,
        "SPLITS": splits,
    }


def num_splits(rows: int, key_heads: int, longest: int, device: torch.device) -> int:
    """Number of splits of the keys, a power of two: enough programs for the device, each with at least four blocks.

    It depends only on shapes, which are fixed in a captured graph, and not on the number of keys in use.
    """
    is_gpu = device.type == "cuda"
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count if is_gpu else 1
    wanted = max(1, FILLED_BY * multiprocessors // (rows * key_heads))
    most = max(1, longest // (4 * BLOCK_TOKENS))
    return 1 << (min(wanted, most, MAX_SPLITS).bit_length() - 1)
