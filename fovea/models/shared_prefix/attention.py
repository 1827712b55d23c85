"""Shared-prefix attention of a packed row: prompts attend causally, completions to their prompt and to themselves.

The result equals attention in n separate rows `prompt + completion`, including gradients: keys and values of a prompt
receive gradients from all of its completions. Five kernels compute the same; the plain ones are the reference.

Axes: `N` tokens of the row, `H` query heads, `J` key heads, `Q` = H / J, `D` width of a head; `P`, `L`, `G`, `T` as in
`models.shared_prefix.layout`; `R` = P x G completions, `K` = L + T keys of a completion.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fovea.models.decoder import Attend, DecoderShape
from fovea.models.shared_prefix.attention_cpu import merged_attention
from fovea.models.shared_prefix.attention_cuda import GatheredVarlen, SharedVarlen
from fovea.models.shared_prefix.layout import SharedPrefixLayout
from fovea.models.varlen import HeadShape, flash_refusal, varlen_refusal
from fovea.models.vision.attention import Attention, eager_attention

Kernel = Literal["auto", "merged", "varlen", "varlen_gathered", "sdpa", "eager"]
RowAttention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(query [N, H, D], key [N, J, D], value [N, J, D]) -> [N, H, D]"""


def row_attention(kernel: Kernel, layout: SharedPrefixLayout, shape: DecoderShape, like: Tensor) -> Attend:
    """Attention function for all layers of one row; auto picks the fastest kernel for device and type of `like`."""
    chosen = fastest_kernel(heads_of(shape, like.device, like.dtype)) if kernel == "auto" else kernel
    # index tensors are built here, once per row, and used by every layer
    attend = KERNELS[chosen](layout, shape.scale)

    def of_layer(_layer: int, query_NHD: Tensor, key_NJD: Tensor, value_NJD: Tensor) -> Tensor:
        return attend(query_NHD, key_NJD, value_NJD)

    return of_layer


def heads_of(shape: DecoderShape, device: torch.device, dtype: torch.dtype) -> HeadShape:
    """Head shape of a decoder whose activations are on this device and of this type."""
    return HeadShape(device, dtype, shape.num_heads, shape.num_kv_heads, shape.head_dim)


def fastest_kernel(heads: HeadShape) -> Kernel:
    """The fastest kernel that supports these heads."""
    if heads.device.type == "cpu":
        return "merged"
    if flash_refusal(heads) is None:
        return "varlen"
    return "varlen_gathered" if varlen_refusal(heads) is None else "sdpa"


def slow_attention_note(heads: HeadShape) -> str | None:
    """Startup note if the device does not support the kernel for packed rows, else None."""
    fastest = fastest_kernel(heads)
    if fastest in ("merged", "varlen"):
        return None
    return (
        f"packed rows: torch's variable-length attention refuses {heads.dtype} heads of {heads.width} here "
        f"({flash_refusal(heads)}); model.attention={fastest} runs instead, which copies the prompt's keys for every "
        f"completion and is several times slower{_advice(heads.dtype)}"
    )


def _advice(dtype: torch.dtype) -> str:
    return "; model.dtype=bfloat16 avoids it" if dtype == torch.float32 else ""


def gathered_attention(attend: Attention, layout: SharedPrefixLayout, scale: float) -> RowAttention:
    """The slow reference: each completion attends to its own copy of the prompt's keys, under a dense mask."""
    return partial(_gathered_attention, partial(attend, scale=scale), layout)


def _gathered_attention(
    attend: Attention, layout: SharedPrefixLayout, query_NHD: Tensor, key_NJD: Tensor, value_NJD: Tensor
) -> Tensor:
    query_PHLD, key_PJLD, value_PJLD = (_gather(x, layout.prompt_index_PL) for x in (query_NHD, key_NJD, value_NJD))
    blocks = [_causal(attend, query_PHLD, key_PJLD, value_PJLD)]
    if layout.has_completions:
        blocks.append(_completion_block(attend, query_NHD, key_NJD, value_NJD, layout))
    return torch.cat([block.flatten(0, 1) for block in blocks])[layout.return_index_N]


KERNELS: dict[Kernel, Callable[[SharedPrefixLayout, float], RowAttention]] = {
    "merged": merged_attention,
    "varlen": SharedVarlen.of,
    "varlen_gathered": GatheredVarlen.of,
    "sdpa": partial(gathered_attention, F.scaled_dot_product_attention),
    "eager": partial(gathered_attention, eager_attention),
}


def causal_prompts(
    query_NHD: Tensor, key_NJD: Tensor, value_NJD: Tensor, layout: SharedPrefixLayout, scale: float
) -> Tensor:
    """Attention [N, H, D] of a row that holds only prompts."""
    query, key, value = (_gather(x, layout.prompt_index_PL) for x in (query_NHD, key_NJD, value_NJD))
    out = _causal(partial(F.scaled_dot_product_attention, scale=scale), query, key, value)
    return out.flatten(0, 1)[layout.return_index_N]


def _causal(attend: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention within each prompt, [P, L, H, D]."""
    # padding follows the real tokens, so the causal mask hides it
    return attend(query, *_repeat_heads(query, key, value), is_causal=True).transpose(1, 2)


def _completion_block(
    attend: Attention, query: Tensor, key: Tensor, value: Tensor, layout: SharedPrefixLayout
) -> Tensor:
    """Attention of completions to their prompt and causally to themselves, [R, T, H, D]."""
    index_RK, mask_R1TK = completion_keys(layout)
    q = _gather(query, layout.completion_index_PGT.flatten(0, 1))
    k, v = (_gather(x, index_RK) for x in (key, value))
    return attend(q, *_repeat_heads(q, k, v), attn_mask=mask_R1TK).transpose(1, 2)


def completion_keys(layout: SharedPrefixLayout) -> tuple[Tensor, Tensor]:
    """Row indices [R, K] of the keys of each completion (its prompt's, then its own), and their mask [R, 1, T, K]."""
    index_RT = layout.completion_index_PGT.flatten(0, 1)
    prompts, largest = layout.completion_index_PGT.shape[:2]
    prompt_of_R = torch.arange(prompts, device=index_RT.device).repeat_interleave(largest)
    causal_TT = torch.ones(2 * index_RT.shape[1:], dtype=torch.bool, device=index_RT.device).tril()
    to_prompt_RTL = layout.prompt_valid_PL[prompt_of_R, None].expand(-1, len(causal_TT), -1)
    mask_RTK = torch.cat([to_prompt_RTL, causal_TT.expand(len(index_RT), -1, -1)], dim=-1)
    return torch.cat([layout.prompt_index_PL[prompt_of_R], index_RT], dim=1), mask_RTK[:, None]


def _gather(x_NHD: Tensor, index_XY: Tensor) -> Tensor:
    """Tokens of a row gathered by index, [X, H, Y, D]."""
    return x_NHD.index_select(0, index_XY.flatten()).view(*index_XY.shape, *x_NHD.shape[1:]).transpose(1, 2)


def _repeat_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values repeated for every query head."""
    # repeated here, since torch would not choose the fused kernel on a CPU with `enable_gqa`
    times = query.shape[1] // key.shape[1]
    if times == 1:
        return key, value
    return key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
