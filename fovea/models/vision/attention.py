"""Attention of the vision tower over several images at once, registered with transformers for its unmodified modules.

On CUDA, one call of torch's variable-length attention computes all segments. The slow reference, which CPUs also use,
calls SDPA once per segment and needs the segment lengths on the host.

Axes: `S` segments, `H` heads, `N` patches of all images, `D` width of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from fovea.models.modules import config_of, vision_tower
from fovea.models.varlen import HeadShape, takes_varlen, varlen_refusal

Attention = Callable[..., Tensor]
"""Function with the arguments of torch's scaled_dot_product_attention."""


def use_segment_attention(network: PreTrainedModel, *, eager: bool = False) -> None:
    """Make a model's vision tower run all images in one pass, with torch's SDPA or, if `eager`, the plain formula."""
    run_in_segments(vision_tower(network), eager=eager)


def run_in_segments(tower: nn.Module, *, eager: bool = False) -> None:
    """Make a vision tower run all images in one pass, as `use_segment_attention` does."""
    # transformers passes segment offsets only to functions with "flash" in their name
    name = f"fovea_flash_segments_{'eager' if eager else 'sdpa'}"
    attend = eager_attention if eager else F.scaled_dot_product_attention
    AttentionInterface.register(name, partial(segment_attention, attend))
    AttentionMaskInterface.register(name, lambda *_args, **_kwargs: None)
    # set on the config: `set_attn_implementation` would look for a flash-attention package by the name
    config_of(tower)._attn_implementation = name


def segment_attention(
    attend: Attention,
    _module: nn.Module,
    query_1HND: Tensor,
    key_1HND: Tensor,
    value_1HND: Tensor,
    _mask: None = None,
    *,
    scaling: float,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int = 0,
    **_kwargs: Any,
) -> tuple[Tensor, None]:
    """Full attention within each segment (an image, a frame or a window); returns [1, N, H, D] and no weights."""
    if cu_seq_lens_q is None:
        # a batch of tiles of one size; transformers 4 makes one call for each segment
        return attend(query_1HND, key_1HND, value_1HND, scale=scaling).transpose(1, 2), None
    query_NHD, key_NHD, value_NHD = (x[0].transpose(0, 1) for x in (query_1HND, key_1HND, value_1HND))
    if attend is not eager_attention and takes_varlen(HeadShape.of(query_NHD, key_NHD)):
        offsets, longest = cu_seq_lens_q, max_length_q
        one_call = varlen_attn(query_NHD, key_NHD, value_NHD, offsets, offsets, longest, longest, scale=scaling)
        assert isinstance(one_call, Tensor)
        return one_call[None], None
    # does not wait for the GPU if the tower got its offsets on the host (`models.vision.tower_inputs`)
    lengths: list[int] = cu_seq_lens_q.diff().tolist()
    # images of equal size, a common case, take one batched call: [S, H, N / S, D] with S segments
    if len(set(lengths)) == 1:
        heads = (query_1HND, key_1HND, value_1HND)
        q, k, v = (x[0].unflatten(1, (len(lengths), -1)).transpose(0, 1) for x in heads)
        out = attend(q, k, v, scale=scaling)
        return out.transpose(1, 2).reshape(1, -1, *out.shape[1::2]), None
    parts = zip(*(x.split(lengths, 2) for x in (query_1HND, key_1HND, value_1HND)), strict=True)
    outs = [attend(q, k, v, scale=scaling) for q, k, v in parts]
    return torch.cat(outs, 2).transpose(1, 2), None


def slow_vision_note(heads: HeadShape) -> str | None:
    """Startup note if the device cannot compute all segments in one call, else None."""
    if heads.device.type == "cpu" or takes_varlen(heads):
        return None
    return (
        f"vision tower: torch's variable-length attention refuses {heads.dtype} heads of {heads.width} here "
        f"({varlen_refusal(heads)}); torch's SDPA runs instead, once per image, frame or window"
    )


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
