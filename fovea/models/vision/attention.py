"""Attention of the vision tower over several images at once, registered with transformers for its unmodified modules.

Axes: `S` segments, `H` heads, `N` patches of all images, `D` width of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from fovea.models.modules import config_of, vision_tower

Attention = Callable[..., Tensor]
"""Function with the arguments of torch's scaled_dot_product_attention."""


def use_segment_attention(network: PreTrainedModel, *, eager: bool = False) -> None:
    """Make the vision tower run all images in one pass, by torch's SDPA or with `eager` by the plain formula."""
    # transformers passes segment offsets only to functions with "flash" in their name
    name = f"fovea_flash_segments_{'eager' if eager else 'sdpa'}"
    attend = eager_attention if eager else F.scaled_dot_product_attention
    AttentionInterface.register(name, partial(segment_attention, attend))
    AttentionMaskInterface.register(name, _no_mask)
    # set on the config: `set_attn_implementation` would look for a flash-attention package by the name
    config_of(vision_tower(network))._attn_implementation = name


def _no_mask(*_args: object, **_kwargs: object) -> None:
    return None


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
    """Full attention within each segment (an image, a frame or a window); returns [1, N, H, D] and no weights."""
    lengths: list[int] = cu_seq_lens_q.diff().tolist()
    # images of one size, a common case, are one batched call
    if len(set(lengths)) == 1:
        q, k, v = (_fold(x, len(lengths)) for x in (query_1HND, key_1HND, value_1HND))
        out = attend(q, k, v, scale=scaling)
        return out.transpose(1, 2).reshape(1, -1, *out.shape[1::2]), None
    parts = zip(*(x.split(lengths, 2) for x in (query_1HND, key_1HND, value_1HND)), strict=True)
    outs = [attend(q, k, v, scale=scaling) for q, k, v in parts]
    return torch.cat(outs, 2).transpose(1, 2), None


def _fold(x_1HND: Tensor, segments: int) -> Tensor:
    """Segments of equal length as a batch, [S, H, N / S, D]."""
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
    """Attention by its formula, softmax(q k' scale) v, with all scores in memory: the reference for kernels."""
    scores = (query @ key.mT).float() * scale
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    return scores.softmax(-1).to(value.dtype) @ value
