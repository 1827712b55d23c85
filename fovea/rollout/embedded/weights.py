"""The language model's weights by role, as references to the tensors that the trainer holds: no copy.

Axes: none; see `fovea.rollout.embedded.decoder` for how they are used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

TEXT = "model.language_model."
HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """A linear layer; Qwen2 has biases on queries, keys and values, Qwen3 has none."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One decoder layer."""

    input_norm: Tensor
    query: Linear
    key: Linear
    value: Linear
    query_norm: Tensor | None
    """Qwen3 normalises queries and keys per head; Qwen2 does not."""
    key_norm: Tensor | None
    output: Linear
    post_norm: Tensor
    gate: Linear
    up: Linear
    down: Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class TextWeights:
    """The decoder stack and its head."""

    embed: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor


def text_weights(named: Mapping[str, Tensor], num_layers: int) -> TextWeights:
    """Pick the language model out of a full set of weights; KeyError names what is missing."""
    embed = named[f"{TEXT}embed_tokens.weight"]
    return TextWeights(
        embed=embed,
        layers=tuple(_layer(named, f"{TEXT}layers.{index}.") for index in range(num_layers)),
        norm=named[f"{TEXT}norm.weight"],
        head=named.get(HEAD, embed),
    )


def _layer(named: Mapping[str, Tensor], prefix: str) -> LayerWeights:
    def linear(name: str) -> Linear:
        return Linear(weight=named[f"{prefix}{name}.weight"], bias=named.get(f"{prefix}{name}.bias"))

    return LayerWeights(
        input_norm=named[f"{prefix}input_layernorm.weight"],
        query=linear("self_attn.q_proj"),
        key=linear("self_attn.k_proj"),
        value=linear("self_attn.v_proj"),
        query_norm=named.get(f"{prefix}self_attn.q_norm.weight"),
        key_norm=named.get(f"{prefix}self_attn.k_norm.weight"),
        output=linear("self_attn.o_proj"),
        post_norm=named[f"{prefix}post_attention_layernorm.weight"],
        gate=linear("mlp.gate_proj"),
        up=linear("mlp.up_proj"),
        down=linear("mlp.down_proj"),
    )
