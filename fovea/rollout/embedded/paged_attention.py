"""Paged attention of decode steps on CUDA, and the trial that it must pass before a run uses it.

Axes: as in `paged_cache`.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from fovea.models.trials import why_refused
from fovea.models.varlen import HeadShape
from fovea.rollout.embedded.paged_cache import PagedKernel, gathered_attention

TRIALS = ((2, 40), (3, 130), (40, 300), (300, 600))
"""Numbers of rows, and maximum numbers of keys per row: a kernel may be right for one row, or up to 128 or 256 keys,
and wrong beyond that."""
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Largest relative error (ratio of norms) by dtype, from the rounding of scores, weights and outputs."""
TRIAL_PAGES = 64
"""Number of pages in the trial's pool, which all rows share."""
PART_ROWS = 16
"""Number of rows for which the plain attention gathers all keys at once."""


@torch.library.custom_op("fovea::paged_attention", mutates_args=())
def paged_attention(
    query_BHD: Tensor, keys: Tensor, values: Tensor, table_BX: Tensor, used_B: Tensor, scale: float
) -> Tensor:
    """Attention of one query per row by the Triton kernel; a `PagedKernel` that CUDA graphs can capture."""
    from fovea.rollout.embedded.paged_triton import triton_attention  # noqa: PLC0415 (Triton may not be installed)

    return triton_attention(query_BHD, keys, values, table_BX, used_B, scale)


@paged_attention.register_fake
def _shape_of_paged_attention(
    query_BHD: Tensor, keys: Tensor, values: Tensor, table_BX: Tensor, used_B: Tensor, scale: float
) -> Tensor:
    return torch.empty_like(query_BHD, memory_format=torch.contiguous_format)


@lru_cache(maxsize=64)
def paged_refusal(shape: HeadShape, page_tokens: int) -> str | None:
    """Reason why `paged_attention` cannot be used for heads of this shape; None if it equals the plain attention."""
    if shape.width < 16 or shape.width & (shape.width - 1):
        return f"its head size must be a power of two and at least 16, not {shape.width}"
    return why_refused(lambda: difference(paged_attention, shape, page_tokens))


def difference(kernel: PagedKernel, shape: HeadShape, page_tokens: int) -> str | None:
    """Describe how a kernel differs from `gathered_attention` on random heads of this shape; None if it does not."""
    for rows, most in TRIALS:
        given = _inputs(shape, page_tokens, rows, most)
        found = kernel(*given, shape.width**-0.5)
        if found.is_meta:  # meta tensors have no values
            continue
        expected = _plain(*given, shape.width**-0.5)
        relative = float((found.float() - expected).norm() / expected.norm())
        if not relative <= TOLERANCE[shape.dtype]:
            return (
                f"for {rows} rows of up to {most} keys, its outputs have a relative error of {relative:.1e}, and "
                f"rounding to {shape.dtype} explains less than {TOLERANCE[shape.dtype]:.0e}"
            )
    return None


def _inputs(shape: HeadShape, page_tokens: int, rows: int, most: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Random queries, pages of keys and values, page table and numbers of keys, including 1 and `most`."""
    random = torch.Generator().manual_seed(rows)
    query = torch.randn(rows, shape.heads, shape.width, generator=random)
    keys, values = torch.randn(2, TRIAL_PAGES, page_tokens, shape.key_heads, shape.width, generator=random)
    table = torch.randint(TRIAL_PAGES, (rows, -(-most // page_tokens)), dtype=torch.int32, generator=random)
    used = torch.randint(1, 1 + most, (rows,), dtype=torch.int32, generator=random)
    used[0], used[-1] = 1, most
    query, keys, values = (x.to(shape.device, shape.dtype) for x in (query, keys, values))
    return query, keys, values, table.to(shape.device), used.to(shape.device)


def _plain(query: Tensor, keys: Tensor, values: Tensor, table: Tensor, used: Tensor, scale: float) -> Tensor:
    keys, values = keys.float(), values.float()
    parts = (x.split(PART_ROWS) for x in (query.float(), table, used))
    return torch.cat(
        [
            gathered_attention(some, keys, values, pages, tokens, scale)
            for some, pages, tokens in zip(*parts, strict=True)
        ]
    )
