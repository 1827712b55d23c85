"""Paged attention of decode steps as a Triton kernel: any page size, 16 and 32 bits, any number of rows.

CUDA graphs can capture it. Its slow reference is `paged_cache.gathered_attention`.

Keys are split over programs. Each program handles the query heads that share its key head, so that a key is read once
for all of them (Dao et al., "Flash-Decoding", 2023); the results are merged by their log-sum-exp. A second pass reads
the full pages of a prompt once for up to `TILE_ROWS` of its rows: the queries of these rows fill the tensor core
product, most of which is padding for the queries of one row. The first pass then begins after these pages.

Axes: as in `paged_cache`; `Q` queries of a program (the query heads of a key head, for each of its rows), `C` splits of
the keys in both passes.
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
MIN_QUERIES = 16
"""Rows of the smallest tensor core product; fewer queries are padded to this number."""
FILLED_BY = 2
"""Number of programs that keep a multiprocessor busy."""


@triton.jit
def tile_of(row, lane, used, shared, mates, GROUP: tl.constexpr, TILE: tl.constexpr):
    """Find the row of each query (-1: padding), and the first token that they read and the one after the last."""
    if TILE == 0:
        row_Q = tl.where(lane < GROUP, row, -1)
        first_token, last_token = tl.load(shared + row), tl.load(used + row)
    else:
        row_Q = tl.load(mates + row * TILE + lane // GROUP, mask=lane < TILE * GROUP, other=-1)
        leads = tl.load(mates + row * TILE) >= 0
        first_token, last_token = 0, tl.where(leads, tl.load(shared + row), 0)
    return row_Q, first_token, last_token


@triton.jit
def with_block(  # noqa: PLR0913, PLR0917
    query_QD, key_DB, value_BD, is_key, scale, top, total, sums
):
    """Take a step of the online softmax: largest scores, sums of exponentials and weighted sums after a block."""
    # without "ieee", a float32 product would be computed in TF32
    score = tl.dot(query_QD, key_DB, input_precision="ieee") * scale
    score = tl.where(is_key[None, :], score, float("-inf"))
    higher = tl.maximum(top, tl.max(score, 1))
    weight = tl.exp(score - higher[:, None])
    # rescales the sums that were computed with the smaller maximum
    kept = tl.exp(top - higher)
    sums = sums * kept[:, None] + tl.dot(weight.to(value_BD.dtype), value_BD, input_precision="ieee")
    return higher, total * kept + tl.sum(weight, 1), sums


@triton.jit
def attend_to_split(  # noqa: PLR0913, PLR0917
    query,
    keys,
    values,
    table,
    used,
    shared,
    mates,
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
    TILE: tl.constexpr,
    QUERIES: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    SHARED_SPLITS: tl.constexpr,
):
    """Attention of a program's queries over one split of its keys, and the log-sum-exp of the scores.

    With TILE = 0, a program has the queries of one row, and the keys after the prompt that the row shares. Otherwise it
    has the queries of up to TILE rows of one prompt, and the keys of this prompt's full pages. The programs of all of
    these rows but the first do nothing.
    """
    row, key_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    lane, width = tl.arange(0, QUERIES), tl.arange(0, WIDTH)
    row_Q, first_token, last_token = tile_of(row, lane, used, shared, mates, GROUP, TILE)
    is_query, head_Q = row_Q >= 0, key_head * GROUP + lane % GROUP
    splits = SPLITS if TILE == 0 else SHARED_SPLITS
    at = (row_Q * HEADS + head_Q) * (SPLITS + SHARED_SPLITS)
    if TILE == 0 and SHARED_SPLITS > 0:  # noqa: SIM102 (known when it is compiled, unlike the condition below)
        if first_token + split == 0:  # a row that shares no pages, for which the other pass writes nothing
            others = at[:, None] + SPLITS + tl.arange(0, SHARED_SPLITS)[None, :]
            tl.store(logs + others, float("-inf"), mask=is_query[:, None])
    # a split has whole blocks, so that no two splits read the same block; the last splits of a short row are empty
    share = tl.cdiv(tl.cdiv(last_token - first_token, BLOCK), splits) * BLOCK
    start = first_token + split * share
    end = tl.minimum(start + share, last_token)
    places = query + row_Q[:, None] * query_row + head_Q[:, None] * query_head + width[None, :]
    query_QD = tl.load(places, mask=is_query[:, None], other=0.0)
    # online softmax: largest score, sum of exponentials and weighted sum of values so far
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    sums = tl.zeros([QUERIES, WIDTH], tl.float32)
    for first in range(start, end, BLOCK):
        token = first + tl.arange(0, BLOCK)
        is_key = token < end
        # int64, since an offset in a large pool exceeds 2^31
        page = tl.load(table + row * table_row + token // PAGE, mask=is_key, other=0).to(tl.int64)
        place = page * page_stride + (token % PAGE) * token_stride + key_head * head_stride
        key_DB = tl.load(keys + place[None, :] + width[:, None], mask=is_key[None, :], other=0.0)
        value_BD = tl.load(values + place[:, None] + width[None, :], mask=is_key[:, None], other=0.0)
        top, total, sums = with_block(query_QD, key_DB, value_BD, is_key, scale, top, total, sums)
    at += split if TILE == 0 else SPLITS + split
    # an empty split gets weight exp(-inf) = 0 in the merge, and no 0 / 0, which would be NaN
    has_keys = total > 0
    tl.store(logs + at, tl.where(has_keys, top + tl.log(total), float("-inf")), mask=is_query)
    mean_QD = sums / tl.where(has_keys, total, 1.0)[:, None]
    tl.store(parts + at[:, None] * WIDTH + width[None, :], mean_QD, mask=is_query[:, None] & has_keys[:, None])


@triton.jit
def merge_splits(parts, logs, out, SPLITS: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr):
    """Merge the splits of one query head of one row, weighted by the exponentials of their log-sum-exp."""
    head = tl.program_id(0)
    split, width = tl.arange(0, PADDED), tl.arange(0, WIDTH)
    log = tl.load(logs + head * SPLITS + split, mask=split < SPLITS, other=float("-inf"))
    weight = tl.exp(log - tl.max(log, 0))
    # an empty split has no part
    has_part = log > float("-inf")
    place = (head * SPLITS + split)[:, None] * WIDTH + width[None, :]
    part_CD = tl.load(parts + place, mask=has_part[:, None], other=0.0)
    # each part is a mean, weighted by its sum of exponentials relative to the largest
    mean_D = tl.sum(part_CD * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out + head * WIDTH + width, mean_D.to(out.dtype.element_ty))


def triton_attention(  # noqa: PLR0913, PLR0917
    query_BHD: Tensor,
    keys: Tensor,
    values: Tensor,
    table_BX: Tensor,
    used_B: Tensor,
    shared_B: Tensor,
    mates_BR: Tensor,
    scale: float,
    splits: tuple[int, int] | None = None,
) -> Tensor:
    """Attention of one query per row, a `PagedKernel`; the head size must be a power of two and at least 16.

    `splits` are the numbers of splits of the keys of a row and of a shared prompt, powers of two; by default as many as
    fill the device.
    """
    rows, heads, width = query_BHD.shape
    page_tokens, key_heads = keys.shape[1:3]
    tile = mates_BR.shape[1]
    assert keys.stride() == values.stride(), (keys.stride(), values.stride())
    assert mates_BR.is_contiguous(), mates_BR.stride()
    query_BHD = query_BHD.contiguous()
    longest, device = table_BX.shape[1] * page_tokens, query_BHD.device
    # most tiles are full in a rollout of groups
    own, shared = splits or (
        num_splits(rows, key_heads, longest, device),
        num_splits(-(-rows // max(tile, 1)), key_heads, longest, device),
    )
    shared = shared if tile else 0
    parts = query_BHD.new_empty(rows, heads, own + shared, width, dtype=torch.float32)
    logs = query_BHD.new_empty(rows, heads, own + shared, dtype=torch.float32)
    out = torch.empty_like(query_BHD)
    for num_programs, rows_of_one in ((own, 0), (shared, tile)):
        if num_programs:
            attend_to_split[(rows, key_heads, num_programs)](
                *(query_BHD, keys, values, table_BX, used_B, shared_B, mates_BR, parts, logs, scale),
                *(*query_BHD.stride()[:2], *keys.stride()[:3], table_BX.stride(0)),
                **constants(heads, key_heads, width, page_tokens, rows_of_one, (own, shared)),
            )
    padded = triton.next_power_of_2(own + shared)
    merge_splits[(rows * heads,)](parts, logs, out, SPLITS=own + shared, PADDED=padded, WIDTH=width)
    return out


def constants(
    heads: int, key_heads: int, width: int, page_tokens: int, tile: int, splits: tuple[int, int]
) -> dict[str, Any]:
    """Compile-time constants of `attend_to_split`; `tile` is the number of rows of a program, 0 in the first pass."""
    group = heads // key_heads
    return {
        "HEADS": heads,
        "GROUP": group,
        "TILE": tile,
        "QUERIES": max(MIN_QUERIES, triton.next_power_of_2(group * max(tile, 1))),
        "WIDTH": width,
        "PAGE": page_tokens,
        "BLOCK": BLOCK_TOKENS,
        "SPLITS": splits[0],
        "SHARED_SPLITS": splits[1],
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
