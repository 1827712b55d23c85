"""Paged attention by PyTorch's flash attention, on CUDA only; its slow twin is `paged_cache.gathered_attention`.

Flash attention 2 may refuse a page table, whatever PyTorch's version; `activate_flash_attention_impl("FA3")` of
`torch.nn.attention` selects version 3 where the package is installed.

Axes: as in `paged_cache`.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn_out

from fovea.models.varlen import HeadShape, why_refused


def varlen_attention(
    query_BHD: Tensor, keys: Tensor, values: Tensor, table_BX: Tensor, used_B: Tensor, scale: float
) -> Tensor:
    """Attention of one query per row; a `PagedKernel` that CUDA graphs can capture."""
    out = torch.empty_like(query_BHD)
    starts = torch.arange(len(query_BHD) + 1, dtype=torch.int32, device=query_BHD.device)
    varlen_attn_out(
        out,
        query_BHD.contiguous(),
        keys,
        values,
        starts,
        None,  # no starts of keys: the page table has them
        1,  # longest query
        table_BX.shape[1] * keys.shape[1],
        scale=scale,
        enable_gqa=True,
        seqused_k=used_B,
        block_table=table_BX.contiguous(),
    )
    return out


@lru_cache(maxsize=64)
def paged_refusal(shape: HeadShape, page_tokens: int) -> str | None:
    """Why the kernel cannot run with heads of this shape and pages of this size; None where it can."""
    if shape.dtype not in (torch.float16, torch.bfloat16):
        return f"it takes 16-bit numbers only, not {shape.dtype}"

    def trial() -> None:
        query = torch.zeros(1, shape.heads, shape.width, dtype=shape.dtype, device=shape.device)
        pages = query.new_zeros(1, page_tokens, shape.key_heads, shape.width)
        table = torch.zeros(1, 1, dtype=torch.int32, device=shape.device)
        varlen_attention(query, pages, pages, table, torch.ones_like(table[0]), 1.0)

    return why_refused(trial)
