"""Paged attention of decode steps on CUDA, and the trial that it must pass before a run uses it.

Axes: as in `paged_cache`.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from fovea.models.trials import why_refused
from fovea.models.varlen import HeadShape
from fovea.rollout.embedded.paged_cache import TILE_ROWS, PagedKernel, gathered_attention, shared_prompts

TRIALS = ((2, 40), (3, 130), (40, 300), (300, 600))
"""Numbers of rows, and maximum numbers of keys per row: a kernel may be right for one row, or up to 128 or 256 keys,
and wrong beyond that."""
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Largest relative error (ratio of norms) by dtype, from the rounding of scores, weights and outputs."""
TRIAL_PAGES = 64
"""Number of pages in the trial's pool, which all rows share."""
PART_ROWS = 16
"""Number of rows for which the plain attention gathers all keys at once."""


Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""The tensors that a `PagedKernel` takes."""


@torch.library.custom_op("fovea::paged_attention", mutates_args=())
def paged_attention(  # noqa: PLR0913, PLR0917
    query_BHD: Tensor,
    keys: Tensor,
    values: Tensor,
    table_BX: Tensor,
    used_B: Tensor,
    shared_B: Tensor,
    mates_BR: Tensor,
    scale: float,
) -> Tensor:
    """Attention of one query per row by the Triton kernel; a `PagedKernel` that CUDA graphs can capture."""
    from fovea.rollout.embedded.paged_triton import triton_attention  # noqa: PLC0415 (Triton may not be installed)

    return triton_attention(query_BHD, keys, values, table_BX, used_B, shared_B, mates_BR, scale)


@paged_attention.register_fake
def _shape_of_paged_attention(query_BHD: Tensor, *_others: Tensor | float) -> Tensor:
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


def _inputs(shape: HeadShape, page_tokens: int, rows: int, most: int) -> Inputs:
    """Random queries, pages of keys and values, page table, numbers of keys (1 and `most` too), and shared prompts.

    Of 12 rows, two have a prompt of half the pages in common, and nine another; they are spread over the batch.
    """
    random = torch.Generator().manual_seed(rows)
    query = torch.randn(rows, shape.heads, shape.width, generator=random)
    keys, values = torch.randn(2, TRIAL_PAGES, page_tokens, shape.key_heads, shape.width, generator=random)
    table = torch.randint(TRIAL_PAGES, (rows, -(-most // page_tokens)), dtype=torch.int32, generator=random)
    used = torch.randint(1, 1 + most, (rows,), dtype=torch.int32, generator=random)
    used[0], used[-1] = 1, most
    pages, order = table.shape[1] // 2, torch.randperm(rows, generator=random).tolist()
    longer = [row for row in order if used[row] > pages * page_tokens]
    prompts = [longer[start + first : start + end] for start in range(0, rows, 12) for first, end in ((0, 2), (2, 11))]
    for mates in prompts:
        table[mates, :pages] = table[mates[:1], :pages]
    shared = shared_prompts([(pages * page_tokens, mates) for mates in prompts], rows, TILE_ROWS)
    query, keys, values = (x.to(shape.device, shape.dtype) for x in (query, keys, values))
    of_rows = (x.to(shape.device) for x in (table, used, shared.tokens_B, shared.mates_BR))
    return (query, keys, values, *of_rows)  # type: ignore[return-value]  # the number of tensors is not inferred


def _plain(query: Tensor, keys: Tensor, values: Tensor, table: Tensor, used: Tensor, *others: Tensor | float) -> Tensor:
    keys, values = keys.float(), values.float()
    parts = (x.split(PART_ROWS) for x in (query.float(), table, used))
    return torch.cat(
        [
            gathered_attention(some, keys, values, pages, tokens, *others)  # type: ignore[arg-type]
            for some, pages, tokens in zip(*parts, strict=True)
        ]
    )
