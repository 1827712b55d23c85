"""Decoder layers of Qwen2 and Qwen3 (RMSNorm, grouped-query attention, SwiGLU) for prefill, decoding and training.

A layer's MLP is one for all tokens, or a mixture of experts (`models.experts`).

Equal to transformers' modules, with which tests compare it. The three uses pass in their own linear layers
(`models.trained_layer` in training) and their own attention over the KV cache or the packed row.

Axes: `N` tokens, `H` query heads, `J` key heads, `D` width of a head, `E` width of the model, `W` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fovea.models.heads import HeadNorm, Heads, heads
from fovea.models.kernels import Gate, ReadSaved, RmsNormFunction, rms_norm, silu_times
from fovea.models.rope import Rope
from fovea.utils.host_waits import awaited


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """RMSNorm of hidden states, norm and rotary positions of heads, and SwiGLU; Liger's are in `kernels_liger`."""

    norm: RmsNormFunction
    heads: Heads
    gate: Gate


TORCH_KERNELS = Kernels(norm=rms_norm, heads=heads, gate=silu_times)


class ExpertLoad:
    """Number of tokens that each expert has run since the last `restart`, by decoder layer.

    Gradient checkpointing runs a layer twice and counts it twice, which changes no ratio within the layer.
    """

    def __init__(self) -> None:
        self._counts: dict[int, Tensor] = {}

    def add(self, layer: int, expert_NK: Tensor, num_experts: int) -> None:
        """Count the tokens of one pass through a layer."""
        chosen = expert_NK.flatten()
        # torch.bincount would wait for the device
        count_X = chosen.new_zeros(num_experts).index_add_(0, chosen, torch.ones_like(chosen))
        self._counts[layer] = count_X if layer not in self._counts else self._counts[layer] + count_X

    def restart(self) -> None:
        """Begin to count anew."""
        self._counts = {}

    def counts(self) -> list[list[int]]:
        """The counts [Y, X]; empty without experts."""
        if not self._counts:
            return []
        counts: list[list[int]] = awaited(torch.stack([self._counts[layer] for layer in sorted(self._counts)])).tolist()
        return counts


def imbalance(counts_of_ranks: Sequence[Sequence[Sequence[int]]]) -> float | None:
    """Largest over mean number of tokens of an expert, from the counts [Y, X] of each rank; the mean over layers.

    1 if all experts have the same number, X / K if all tokens run through the same experts; None without counts.
    """
    counts_YX = np.sum(np.array(counts_of_ranks, dtype=np.int64), axis=0)
    return float((counts_YX.max(-1) / counts_YX.mean(-1)).mean()) if counts_YX.size else None


Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, query [N, H, D], key [N, J, D], value [N, J, D]) -> [N, H, D]"""
Norm = Callable[[Tensor], Tensor]
Linears = Callable[[Tensor], tuple[Tensor, ...]]
"""One or more linear layers on the same input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """Sizes of a decoder that cannot be read off its weights."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    experts_per_token: int = 0
    """Number of experts that a token runs through; 0 in a model without experts."""

    @property
    def scale(self) -> float:
        """Factor on attention scores, 1 / sqrt(head_dim)."""
        return float(self.head_dim**-0.5)


def decoder_shape(text_config: Any) -> DecoderShape:
    """The shape in a text config of transformers."""
    heads = text_config.num_attention_heads
    return DecoderShape(
        num_layers=text_config.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=text_config.num_key_value_heads,
        head_dim=getattr(text_config, "head_dim", None) or text_config.hidden_size // heads,
        norm_eps=text_config.rms_norm_eps,
        experts_per_token=getattr(text_config, "num_experts_per_tok", 0),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class VisualResidual:
    """Qwen3-VL's deepstack: features added to the hidden states of the visual tokens after the first layers."""

    tokens: Tensor
    layers: Sequence[Tensor]

    def add_to(self, hidden_NE: Tensor, layer: int) -> Tensor:
        """The hidden states that leave `layer`."""
        if layer >= len(self.layers):
            return hidden_NE
        return hidden_NE.index_add(0, self.tokens, self.layers[layer].to(hidden_NE.dtype))


@dataclass(frozen=True, slots=True)
class LayerCall:
    """Arguments of a decoder layer besides its hidden states."""

    index: int
    shape: DecoderShape
    rope: Rope
    attend: Attend
    """Attention of this pass; may append keys and values to a KV cache."""
    kernels: Kernels = TORCH_KERNELS
    wanted: Tensor | None = None
    """Indices of the tokens whose hidden states are used after this layer; None for all tokens."""
    expert_load: ExpertLoad | None = None
    """Counts the tokens of each expert of this pass, if given."""


Mlp = Callable[[Tensor, LayerCall], Tensor]
"""(x [N, E], call of its layer) -> [N, E]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedMlp:
    """An MLP that all tokens run through."""

    gate_up: Linears
    down: Linears
    saved_gate_up: Sequence[ReadSaved] | None = None
    """Reads the outputs of `gate_up` once more, where they are on the activation tape."""

    def __call__(self, x_NE: Tensor, call: LayerCall) -> Tensor:
        gate, up = self.gate_up(x_NE)
        (out_NE,) = self.down(call.kernels.gate(gate, up, self.saved_gate_up))
        return out_NE


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """Norms, linear layers and MLP of one pre-norm decoder layer, as functions."""

    input_norm: Norm
    query_key_value: Linears
    head_norm: HeadNorm | None
    """Qwen3 normalises queries and keys per head; Qwen2 does not."""
    output: Linears
    post_norm: Norm
    mlp: Mlp
    saved_qkv: Sequence[ReadSaved] | None = None
    """Reads the outputs of `query_key_value` once more, where they are on the activation tape."""


def run_layer(layer: DecoderLayer, hidden_NE: Tensor, call: LayerCall) -> Tensor:
    """Hidden states [N, E] after one layer."""
    query, key, value = layer.query_key_value(layer.input_norm(hidden_NE))
    query_NHD, key_NJD, value_NJD = call.kernels.heads(
        (query, key, value), call.shape.head_dim, layer.head_norm, call.rope, layer.saved_qkv
    )
    out_NHD = call.attend(call.index, query_NHD, key_NJD, value_NJD)
    # the other tokens had to give keys and values; their output projection and MLP would be read by nothing
    if call.wanted is not None:
        out_NHD, hidden_NE = out_NHD.index_select(0, call.wanted), hidden_NE.index_select(0, call.wanted)
    (attended_NE,) = layer.output(out_NHD.flatten(1))
    hidden_NE = hidden_NE + attended_NE
    return hidden_NE + layer.mlp(layer.post_norm(hidden_NE), call)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """All decoder layers and the final norm."""

    layers: tuple[DecoderLayer, ...]
    norm: Norm


def decode(
    decoder: Decoder,
    shape: DecoderShape,
    hidden_NE: Tensor,
    rope: Rope,
    attend: Attend,
    visual: VisualResidual | None = None,
) -> Tensor:
    """Hidden states [N, E] after the final norm."""
    for index, layer in enumerate(decoder.layers):
        hidden_NE = run_layer(layer, hidden_NE, LayerCall(index, shape, rope, attend))
        if visual is not None:
            hidden_NE = visual.add_to(hidden_NE, index)
    return decoder.norm(hidden_NE)
