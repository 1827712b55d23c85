"""Our attention functions in transformers' registry: the seam by which unmodified Qwen-VL modules run packed rows.

The one for the language model reads a `SharedPrefixLayout` from the model call's keyword arguments. The one for the
vision tower handles all images in one call; transformers passes segment offsets only to functions with "flash" in
their name.

Axes: `H` query heads, `J` key heads, `N` tokens of the row, `D` width of a head; others as in `models.layout`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from fovea.models.layout import SharedPrefixLayout
from fovea.models.parts import config_of, language_model, vision_tower

Kernel = Literal["sdpa", "eager"]
Attention = Callable[..., Tensor]
"""As torch's scaled_dot_product_attention."""


def use_packed_attention(network: PreTrainedModel, kernel: Kernel = "sdpa") -> None:
    """Make a network run packed rows. The slow twin is the same network with transformers' own attention."""
    attend = KERNELS[kernel]
    language, vision = f"fovea_shared_prefix_{kernel}", f"fovea_flash_segments_{kernel}"
    AttentionInterface.register(language, partial(shared_prefix_attention, attend))
    AttentionInterface.register(vision, partial(segment_attention, attend))
    for name in (language, vision):
        AttentionMaskInterface.register(name, _no_mask)
    # set on the configs: `set_attn_implementation` would look for a flash-attention package by the name
    config_of(language_model(network))._attn_implementation = language
    config_of(vision_tower(network))._attn_implementation = vision


def _no_mask(*_args: object, **_kwargs: object) -> None:
    return None


def shared_prefix_attention(
    attend: Attention,
    _module: nn.Module,
    query_1HND: Tensor,
    key_1JND: Tensor,
    value_1JND: Tensor,
    _mask: None,
    *,
    scaling: float,
    layout: SharedPrefixLayout,
    **_kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of a packed row; returns [1, N, H, D] as transformers expects.

    Equal to n separate rows `prompt + completion`, gradients included: prompt keys and values serve every completion
    and collect their gradients.
    """
    query_NHD, key_NJD, value_NJD = (x[0].transpose(0, 1) for x in (query_1HND, key_1JND, value_1JND))
    attend = partial(attend, scale=scaling)
    blocks = [_prompt_block(attend, query_NHD, key_NJD, value_NJD, layout)]
    if layout.completion_index_RT.numel():
        blocks.append(_completion_block(attend, query_NHD, key_NJD, value_NJD, layout))
    out_NHD = torch.cat([block.flatten(0, 1) for block in blocks])[layout.return_index_N]
    return out_NHD[None], None


def causal_prompts(
    query_NHD: Tensor, key_NJD: Tensor, value_NJD: Tensor, layout: SharedPrefixLayout, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """A row of prompts alone: attention output [N, H, D], and keys and values [P, J, L, D] for a cache."""
    query, key, value = (_gather(x, layout.prompt_index_PL) for x in (query_NHD, key_NJD, value_NJD))
    out = _causal(partial(KERNELS["sdpa"], scale=scale), query, key, value)
    return out.flatten(0, 1)[layout.return_index_N], key, value


def _prompt_block(attend: Attention, query: Tensor, key: Tensor, value: Tensor, layout: SharedPrefixLayout) -> Tensor:
    """Causal attention inside each prompt, [P, L, H, D]."""
    return _causal(attend, *(_gather(x, layout.prompt_index_PL) for x in (query, key, value)))


def _causal(attend: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Padding sits behind the real tokens, so that causality alone hides it."""
    return attend(query, *_repeat_heads(query, key, value), is_causal=True).transpose(1, 2)


def _completion_block(
    attend: Attention, query: Tensor, key: Tensor, value: Tensor, layout: SharedPrefixLayout
) -> Tensor:
    """Attention of completions to their prompt and themselves, [R, T, H, D]."""
    q = _gather(query, layout.completion_index_RT)
    k, v = (_gather(x, layout.key_index_RK) for x in (key, value))
    return attend(q, *_repeat_heads(q, k, v), attn_mask=layout.key_mask_R1TK).transpose(1, 2)


def _gather(x_NHD: Tensor, index_XY: Tensor) -> Tensor:
    """[X, H, Y, D] from a row and an index."""
    return x_NHD.index_select(0, index_XY.flatten()).view(*index_XY.shape, *x_NHD.shape[1:]).transpose(1, 2)


def _repeat_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values for every query head; `enable_gqa` would leave the fused CPU kernel."""
    times = query.shape[1] // key.shape[1]
    if times == 1:
        return key, value
    return key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)


def segment_attention(
    attend: Attention,
    _module: nn.Module,
    query_1HND: Tensor,
    key_1HND: Tensor,
    value_1HND: Tensor,
    attention_mask: None = None,
    *,
    scaling: float,
    cu_seq_lens_q: Tensor,
    **_kwargs: Any,
) -> tuple[Tensor, None]:
    """Full attention inside each segment (an image, a frame or a window); returns [1, N, H, D].

    Segments of one length, the common case of a batch of equal images, are one batched call.
    """
    lengths: list[int] = cu_seq_lens_q.diff().tolist()
    if len(set(lengths)) == 1:
        q, k, v = (_fold(x, len(lengths)) for x in (query_1HND, key_1HND, value_1HND))
        out = attend(q, k, v, scale=scaling)
        return out.transpose(1, 2).reshape(1, -1, *out.shape[1::2]), None
    parts = zip(*(x.split(lengths, 2) for x in (query_1HND, key_1HND, value_1HND)), strict=True)
    outs = [attend(q, k, v, scale=scaling) for q, k, v in parts]
    return torch.cat(outs, 2).transpose(1, 2), None


def _fold(x_1HND: Tensor, segments: int) -> Tensor:
    """[S, H, N / S, D]."""
    split: Tensor = x_1HND[0].unflatten(1, (segments, -1))
    return split.transpose(0, 1)


def eager_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float,
) -> Tensor:
    """The formula, softmax(q k' scale) v, with every score in memory: for checking kernels, not for speed."""
    scores = (query @ key.mT).float() * scale
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    return scores.softmax(-1).to(value.dtype) @ value


KERNELS: dict[Kernel, Attention] = {"sdpa": F.scaled_dot_product_attention, "eager": eager_attention}
