"""The decoder stack of Qwen2 and Qwen3 on plain tensors, for prefill and decoding alike.

The same maths as transformers' modules without their bookkeeping; a test holds the two together.

Axes: `B` tokens in flight, `H` query heads, `J` key heads, `D` width of a head, `E` width of the model, `W` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fovea.rollout.embedded.weights import LayerWeights, Linear, TextWeights

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, query [B, H, D], key [B, J, D], value [B, J, D]) -> [B, H, D]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """Sizes that the weights alone do not tell."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)


def decoder_shape(text_config: Any) -> DecoderShape:
    """From the text config of transformers."""
    heads = text_config.num_attention_heads
    return DecoderShape(
        num_layers=text_config.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=text_config.num_key_value_heads,
        head_dim=getattr(text_config, "head_dim", None) or text_config.hidden_size // heads,
        norm_eps=text_config.rms_norm_eps,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class VisualResidual:
    """Qwen3-VL's deepstack: features added to the hidden states of the visual tokens after the first layers."""

    tokens: Tensor
    layers: Sequence[Tensor]


def decode(
    weights: TextWeights,
    shape: DecoderShape,
    hidden_BE: Tensor,
    rope_BD: tuple[Tensor, Tensor],
    attend: Attend,
    visual: VisualResidual | None = None,
) -> Tensor:
    """Hidden states [B, E] after the final norm. `attend` keeps the keys and values and looks back at them."""
    for index, layer in enumerate(weights.layers):
        hidden_BE = hidden_BE + _attention(index, layer, shape, hidden_BE, rope_BD, attend)
        hidden_BE = hidden_BE + _mlp(layer, _norm(hidden_BE, layer.post_norm, shape))
        if visual is not None and index < len(visual.layers):
            hidden_BE = hidden_BE.index_add(0, visual.tokens, visual.layers[index])
    return _norm(hidden_BE, weights.norm, shape)


def logits(weights: TextWeights, hidden_BE: Tensor) -> Tensor:
    """Next-token logits [B, W] in float32."""
    return F.linear(hidden_BE, weights.head).float()


def _attention(
    index: int,
    layer: LayerWeights,
    shape: DecoderShape,
    hidden_BE: Tensor,
    rope_BD: tuple[Tensor, Tensor],
    attend: Attend,
) -> Tensor:
    x = _norm(hidden_BE, layer.input_norm, shape)
    query = _linear(x, layer.query).unflatten(-1, (shape.num_heads, shape.head_dim))
    key = _linear(x, layer.key).unflatten(-1, (shape.num_kv_heads, shape.head_dim))
    value = _linear(x, layer.value).unflatten(-1, (shape.num_kv_heads, shape.head_dim))
    if layer.query_norm is not None and layer.key_norm is not None:
        query, key = _norm(query, layer.query_norm, shape), _norm(key, layer.key_norm, shape)
    out = attend(index, _rotate(query, rope_BD), _rotate(key, rope_BD), value)
    return _linear(out.flatten(1), layer.output)


def _mlp(layer: LayerWeights, x: Tensor) -> Tensor:
    return _linear(F.silu(_linear(x, layer.gate)) * _linear(x, layer.up), layer.down)


def _linear(x: Tensor, linear: Linear) -> Tensor:
    return F.linear(x, linear.weight, linear.bias)


def _norm(x: Tensor, weight: Tensor, shape: DecoderShape) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, shape.norm_eps)


def _rotate(x_BHD: Tensor, rope_BD: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding (Su et al., arXiv 2104.09864) with the halves layout of Qwen."""
    cos, sin = rope_BD[0][:, None], rope_BD[1][:, None]
    first, second = x_BHD.chunk(2, dim=-1)
    return torch.addcmul(x_BHD * cos, torch.cat([-second, first], dim=-1), sin)
