"""Decoder layers of Qwen2 and Qwen3 (RMSNorm, grouped-query attention, SwiGLU) for prefill, decoding and training.

A layer has one MLP for all tokens, or a mixture of experts (`models.experts`). In Qwen3.5, most layers have a gated
delta net (`models.delta_net`) in place of attention; in GLM-4.1V, the outputs of attention and MLP are normalised too.

The layers compute the same as transformers' modules; tests compare them. Each of the three uses passes in its own
linear layers (`models.trained_layer` in training) and its own attention over the KV cache or the packed row.

Axes: `N` tokens, `H` query heads, `J` key heads, `D` width of a head, `E` width of the model, `W` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fovea.models.delta_rule import DeltaShape, Scan
from fovea.models.heads import HeadNorm, Heads, Triple, heads, unfused_heads
from fovea.models.kernels import Gate, ReadSaved, RmsNormFunction, centred_norm, rms_norm, silu_times
from fovea.models.rope import Rope, halves_of_pairs
from fovea.models.trials import Tensors, first_difference, random_tensor, values_and_gradients, why_refused
from fovea.utils.host_waits import awaited


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """RMSNorm of hidden states, norm and rotary positions of heads, and SwiGLU; Liger's are in `kernels_liger`."""

    norm: RmsNormFunction
    heads: Heads
    gate: Gate


TORCH_KERNELS = Kernels(norm=rms_norm, heads=heads, gate=silu_times)


def kernels_for(shape: DecoderShape, kernels: Kernels = TORCH_KERNELS) -> Kernels:
    """These kernels, adapted to a decoder of this shape: Qwen3.5 stores norm weights minus 1."""
    if shape.delta is None:
        return kernels
    centred = partial(centred_norm, kernels.norm)

    def centred_heads(
        projections: Triple,
        width: int,
        norm: HeadNorm | None,
        rope: Rope,
        saved: Sequence[ReadSaved] | None = None,
    ) -> Triple:
        assert saved is None, "an activation tape of a decoder with delta nets"
        return unfused_heads(projections, width, norm, rope, norm_kernel=centred)

    return replace(kernels, norm=centred, heads=centred_heads)


TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Largest norm of a difference between kernels, relative to the norm of the values."""


def kernels_refusal(kernels: Kernels, text_config: Any, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why these kernels cannot be used for this decoder; None if their values match those of `TORCH_KERNELS`."""
    mlp = getattr(text_config, "intermediate_size", None) or text_config.moe_intermediate_size
    return _kernels_refusal(kernels, decoder_shape(text_config), (text_config.hidden_size, mlp), device, dtype)


@lru_cache(maxsize=64)
def _kernels_refusal(
    kernels: Kernels, shape: DecoderShape, widths: tuple[int, int], device: torch.device, dtype: torch.dtype
) -> str | None:
    like = torch.empty(0, device=device, dtype=dtype)

    def trial() -> str | None:
        for tokens in (1, 3, 64, 130):
            tried, plain = (_trial_values(each, tokens, shape, widths, like) for each in (kernels, TORCH_KERNELS))
            wrong = first_difference(tried, plain, TOLERANCE[dtype])
            if wrong is not None:
                return f"{tokens} tokens: {wrong}"
        return None

    return why_refused(trial)


def _trial_values(
    kernels: Kernels, tokens: int, shape: DecoderShape, widths: tuple[int, int], like: Tensor
) -> dict[str, Tensor]:
    """Outputs and gradients of all kernels on random hidden states, heads with and without norms, and an MLP."""
    kernels, width = kernels_for(shape, kernels), shape.head_dim
    angles_ND = random_tensor(tokens, width // 2, like=like.float()).repeat(1, 2)
    rope = Rope.of(angles_ND.cos().to(like), angles_ND.sin().to(like))

    def run(query: Tensor, key: Tensor, value: Tensor, query_norm: Tensor, key_norm: Tensor, **of: Tensor) -> Tensors:
        norm, names = HeadNorm(query_norm, key_norm, shape.norm_eps), ("queries", "keys", "values")
        found = {
            "RMS norm": kernels.norm(of["hidden"], of["weight"], shape.norm_eps),
            "SwiGLU": kernels.gate(of["gate"], of["up"]),
        }
        # heads with norms come first, since they do not overwrite their inputs
        found |= zip(names, kernels.heads((query, key, value), width, norm, rope), strict=True)
        rotated = kernels.heads((query, key, value), width, None, rope)
        return found | {f"{name} without norm": x for name, x in zip(names, rotated, strict=True)}

    (hidden, mlp), of_keys = widths, shape.num_kv_heads * width
    rows = {
        "query": shape.num_heads * width,
        "key": of_keys,
        "value": of_keys,
        "hidden": hidden,
        "gate": mlp,
        "up": mlp,
    }
    inputs = {name: random_tensor(tokens, size, like=like, seed=seed) for seed, (name, size) in enumerate(rows.items())}
    weights = {"query_norm": width, "key_norm": width, "weight": hidden}
    inputs |= {name: random_tensor(size, like=like, seed=9 + seed) for seed, (name, size) in enumerate(weights.items())}
    return values_and_gradients(run, inputs)


class ExpertLoad:
    """Number of tokens that each expert has processed since the last `restart`, by decoder layer.

    Gradient checkpointing runs a layer twice and counts it twice; ratios within a layer do not change.
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
        """Reset all counts."""
        self._counts = {}

    def counts(self) -> list[list[int]]:
        """The counts [Y, X] of Y layers and X experts; empty for a model without experts."""
        if not self._counts:
            return []
        counts: list[list[int]] = awaited(torch.stack([self._counts[layer] for layer in sorted(self._counts)])).tolist()
        return counts


def imbalance(counts_of_ranks: Sequence[Sequence[Sequence[int]]]) -> float | None:
    """Largest over mean number of tokens per expert, averaged over layers, from the counts [Y, X] of each rank.

    1 if all experts get the same number, X / K if all tokens run through the same K experts; None without counts.
    """
    counts_YX = np.sum(np.array(counts_of_ranks, dtype=np.int64), axis=0)
    return float((counts_YX.max(-1) / counts_YX.mean(-1)).mean()) if counts_YX.size else None


Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, query [N, H, D], key [N, J, D], value [N, J, D]) -> [N, H, D]"""
Norm = Callable[[Tensor], Tensor]
Linears = Callable[[Tensor], tuple[Tensor, ...]]
"""One or more linear layers on the same input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertGroups:
    """Rule by which GLM routes tokens to experts."""

    count: int
    per_token: int
    """Groups from which a token's experts are chosen."""
    scale: float
    """Factor on the weights of a token's experts."""
    normed: bool
    """True if these weights are normalised to sum to the factor."""


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
    groups: ExpertGroups | None = None
    """None if tokens are routed by a softmax over all experts."""
    delta: DeltaShape | None = None
    """Sizes of the delta nets of Qwen3.5, whose attention has output gates; None if all layers have attention."""
    rotates_pairs: bool = False
    """True if rotary positions rotate neighbouring channels (GLM-4.1V) instead of one from each half of a head."""

    @property
    def is_delta(self) -> tuple[bool, ...]:
        """True for each layer that is a delta net."""
        return (False,) * self.num_layers if self.delta is None else self.delta.is_delta

    @property
    def num_attention_layers(self) -> int:
        """Number of layers with attention, which need a KV cache."""
        return self.num_layers - sum(self.is_delta)

    def cached_as(self, layer: int) -> int:
        """Index of a layer among the layers of its kind, which is its index in a cache."""
        return sum(kind == self.is_delta[layer] for kind in self.is_delta[:layer])

    def token_bytes(self, width: int) -> int:
        """Bytes of the keys and values of a token in all layers; `width` is the number of bytes of one activation."""
        return 2 * self.num_attention_layers * self.num_kv_heads * self.head_dim * width

    def state_tokens(self, width: int) -> int:
        """Number of tokens whose keys and values take as much memory as one row's states; 0 without delta nets."""
        return 0 if self.delta is None else -(-self.delta.state_bytes(width) // self.token_bytes(width))

    @property
    def scale(self) -> float:
        """Factor on attention scores, 1 / sqrt(head_dim)."""
        return float(self.head_dim**-0.5)


def decoder_shape(text_config: Any) -> DecoderShape:
    """The shape of a decoder with this transformers text config."""
    heads = text_config.num_attention_heads
    return DecoderShape(
        num_layers=text_config.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=text_config.num_key_value_heads,
        head_dim=getattr(text_config, "head_dim", None) or text_config.hidden_size // heads,
        norm_eps=text_config.rms_norm_eps,
        experts_per_token=getattr(text_config, "num_experts_per_tok", 0),
        groups=_expert_groups(text_config),
        delta=_delta_shape(text_config),
        rotates_pairs=text_config.model_type == "glm4v_text",
    )


def _expert_groups(text_config: Any) -> ExpertGroups | None:
    if not hasattr(text_config, "topk_group"):
        return None
    return ExpertGroups(
        count=text_config.n_group,
        per_token=text_config.topk_group,
        scale=text_config.routed_scaling_factor,
        normed=text_config.norm_topk_prob,
    )


def _delta_shape(text_config: Any) -> DeltaShape | None:
    if not hasattr(text_config, "linear_num_key_heads"):
        return None
    return DeltaShape(
        is_delta=tuple(kind == "linear_attention" for kind in text_config.layer_types),
        key_heads=text_config.linear_num_key_heads,
        value_heads=text_config.linear_num_value_heads,
        key_dim=text_config.linear_key_head_dim,
        value_dim=text_config.linear_value_head_dim,
        window=text_config.linear_conv_kernel_dim,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class VisualResidual:
    """Qwen3-VL's deepstack: features added to the hidden states of the visual tokens after the first layers."""

    tokens: Tensor
    layers: Sequence[Tensor]

    def add_to(self, hidden_NE: Tensor, layer: int) -> Tensor:
        """Hidden states after `layer`, with that layer's features added."""
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
    """Counter of the tokens that each expert processes in this pass; None to count nothing."""
    scan: Scan | None = None
    """The delta rule of this pass, in a decoder with delta nets; may continue and keep states."""


Mixer = Callable[[Tensor, LayerCall], Tensor]
"""(x [N, E], call of its layer) -> [N, E], only for the wanted tokens if the call names any."""
Mlp = Callable[[Tensor, LayerCall], Tensor]
"""(x [N, E], call of its layer) -> [N, E]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedMlp:
    """An MLP that all tokens run through."""

    gate_up: Linears
    """Returns gate and up as two outputs, or as one output with both concatenated."""
    down: Linears
    saved_gate_up: Sequence[ReadSaved] | None = None
    """Readers of the outputs of `gate_up`, if these are on the activation tape."""

    def __call__(self, x_NE: Tensor, call: LayerCall) -> Tensor:
        outs = self.gate_up(x_NE)
        gate, up = outs if len(outs) == 2 else outs[0].chunk(2, -1)
        (out_NE,) = self.down(call.kernels.gate(gate, up, self.saved_gate_up))
        return out_NE


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfAttention:
    """Projections and norms of an attention layer."""

    query_key_value: Linears
    head_norm: HeadNorm | None
    """Qwen3 normalises queries and keys per head; Qwen2 does not."""
    output: Linears
    saved_qkv: Sequence[ReadSaved] | None = None
    """Readers of the outputs of `query_key_value`, if these are on the activation tape."""

    def __call__(self, x_NE: Tensor, call: LayerCall) -> Tensor:
        query, key, value = self.query_key_value(x_NE)
        gate_NHD = None
        if call.shape.delta is not None:
            # each head holds its query and its gate, concatenated
            query_NHD, gate_NHD = query.unflatten(-1, (-1, 2 * call.shape.head_dim)).chunk(2, -1)
            query = query_NHD.flatten(1)
        if call.shape.rotates_pairs:
            query, key = (halves_of_pairs(x, call.shape.head_dim, call.rope.cos_ND.shape[-1]) for x in (query, key))
        query_NHD, key_NJD, value_NJD = call.kernels.heads(
            (query, key, value), call.shape.head_dim, self.head_norm, call.rope, self.saved_qkv
        )
        out_NHD = call.attend(call.index, query_NHD, key_NJD, value_NJD)
        # the other tokens are needed only as keys and values: nothing reads their output projection and MLP
        if call.wanted is not None:
            out_NHD = out_NHD.index_select(0, call.wanted)
            gate_NHD = None if gate_NHD is None else gate_NHD.index_select(0, call.wanted)
        if gate_NHD is not None:
            out_NHD = out_NHD * gate_NHD.sigmoid()
        (out_NE,) = self.output(out_NHD.flatten(1))
        return out_NE


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """Norms, attention or delta net, and MLP of one pre-norm decoder layer, as functions."""

    input_norm: Norm
    mixer: Mixer
    mixed_norm: Norm | None = None
    post_norm: Norm
    mlp: Mlp
    mlp_norm: Norm | None = None


def run_layer(layer: DecoderLayer, hidden_NE: Tensor, call: LayerCall) -> Tensor:
    """Hidden states [N, E] after one layer."""
    mixed_NE = _normed(layer.mixer(layer.input_norm(hidden_NE), call), layer.mixed_norm)
    if call.wanted is not None:
        hidden_NE = hidden_NE.index_select(0, call.wanted)
    hidden_NE = hidden_NE + mixed_NE
    return hidden_NE + _normed(layer.mlp(layer.post_norm(hidden_NE), call), layer.mlp_norm)


def _normed(x_NE: Tensor, norm: Norm | None) -> Tensor:
    return x_NE if norm is None else norm(x_NE)


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
    scan: Scan | None = None,
) -> Tensor:
    """Hidden states [N, E] after the final norm."""
    kernels = kernels_for(shape)
    for index, layer in enumerate(decoder.layers):
        call = LayerCall(shape.cached_as(index), shape, rope, attend, kernels, scan=scan)
        hidden_NE = run_layer(layer, hidden_NE, call)
        if visual is not None:
            hidden_NE = visual.add_to(hidden_NE, index)
    return decoder.norm(hidden_NE)
