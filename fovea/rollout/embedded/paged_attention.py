"""Paged attention by PyTorch's own flash attention. Runs on CUDA only; `paged.gathered_attention` is its twin.

Not run by the tests, which have no CUDA device: `usable` tries it on the device before the engine relies on it. (With
flash attention 2 a table of pages may be refused, whatever PyTorch's version; `activate_flash_attention_impl("FA3")`
of `torch.nn.attention` turns it on where the package is installed.)

Axes: as in `paged`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn_out

from fovea.models.decoder import DecoderShape


def varlen_attention(
    query_BHD: Tensor, keys: Tensor, values: Tensor, table_BX: Tensor, used_B: Tensor, scale: float
) -> Tensor:
    """A `PagedKernel`: one query per row; capturable, since its output has a place of its own."""
    out = torch.empty_like(query_BHD)
    starts = torch.arange(len(query_BHD) + 1, dtype=torch.int32, device=query_BHD.device)
    varlen_attn_out(
        out,
        query_BHD.contiguous(),
        keys,
        values,
        starts,
        None,  # where keys start: the table says it
        1,
        table_BX.shape[1] * keys.shape[1],
        scale=scale,
        enable_gqa=True,
        seqused_k=used_B,
        block_table=table_BX.contiguous(),
    )
    return out


def usable(shape: DecoderShape, like: Tensor, page_tokens: int) -> bool:
    """Whether the kernel runs for this type, head width and size of a page on this device."""
    if like.device.type != "cuda" or like.dtype not in (torch.float16, torch.bfloat16):
        return False
    query = like.new_zeros(1, shape.num_heads, shape.head_dim)
    pages = like.new_zeros(1, page_tokens, shape.num_kv_heads, shape.head_dim)
    table = torch.zeros(1, 1, dtype=torch.int32, device=like.device)
    try:
        varlen_attention(query, pages, pages, table, torch.ones_like(table[0]), shape.scale)
    except (RuntimeError, ValueError):  # what PyTorch raises for a page size, head width or device it cannot do
        return False
    return True
