"""Paged attention by PyTorch's flash attention, on CUDA only; its slow twin is `paged_cache.gathered_attention`.

Flash attention 2 may refuse a page table, whatever PyTorch's version; `activate_flash_attention_impl("FA3")` of
`torch.nn.attention` selects version 3 where the package is installed.

Axes: as in `paged_cache`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn_out

from fovea.models.decoder import DecoderShape


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


def usable(shape: DecoderShape, like: Tensor, page_tokens: int) -> bool:
    """Whether the kernel runs for this dtype, head width and page size on this device."""
    if like.device.type != "cuda" or like.dtype not in (torch.float16, torch.bfloat16):
        return False
    # a trial run: no table of supported combinations is published, and the tests have no CUDA device
    query = like.new_zeros(1, shape.num_heads, shape.head_dim)
    pages = like.new_zeros(1, page_tokens, shape.num_kv_heads, shape.head_dim)
    table = torch.zeros(1, 1, dtype=torch.int32, device=like.device)
    try:
        varlen_attention(query, pages, pages, table, torch.ones_like(table[0]), shape.scale)
    except (RuntimeError, ValueError):  # PyTorch raises either for an unsupported page size, head width or device
        return False
    return True
