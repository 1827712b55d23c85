"""The language model's weights as the engine runs them, with three implementations of the linear layers.

Plain: references to the trainer's tensors, with LoRA adapters separate from the weights, since merging in 16 bits would
round most of an adapter away (decision 016). oneDNN: decode copies in oneDNN's blocked layout, for few rows, with
adapters merged in float32 and separate in bfloat16. int8: decode copies in 8 bits with adapters merged; only these
change results. Experts of a mixture are the trainer's tensors in all three implementations.

Axes: `N` tokens, `B` rows of the decode batch, `E` inputs and `O` outputs of a layer, `R` ranks of adapters together,
`X` rows of a matrix, `W` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fovea.models.activation_tape import LinearGroup, Tape, TapeColumn
from fovea.models.decoder import (
    Decoder,
    DecoderLayer,
    DecoderShape,
    GatedMlp,
    Linears,
    Mixer,
    Norm,
    SelfAttention,
    kernels_for,
)
from fovea.models.delta_net import DeltaNet
from fovea.models.experts import Experts, SharedExpert
from fovea.models.families.qwen_vl import LANGUAGE
from fovea.models.heads import HeadNorm
from fovea.models.linear_factors import Factors, add_adapter, merged_weight
from fovea.models.trainable import adapter_names
from fovea.models.transformers_versions import experts_tensor

ONEDNN: Any = torch.ops.mkldnn
EXPECTED_ROWS = 32
"""Number of rows for which oneDNN chooses its layout; other numbers work too."""

INT8_MAX = 127
"""Largest magnitude of a quantized number: the 8-bit range, made symmetric."""

HEAD = "lm_head.weight"
OF_NET = ("conv1d.weight", "A_log", "dt_bias", "norm.weight")
"""Weights of a delta net that are not linear layers."""
NO_COLUMNS = (None,) * len(LinearGroup)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextWeights:
    """Weights of the language model: embedding, decoder layers and head."""

    embed: Tensor
    decoder: Decoder
    head: Linears

    def logits(self, hidden_BE: Tensor) -> Tensor:
        """Compute next-token logits [B, W] in float32."""
        (logits_BW,) = self.head(hidden_BE)
        return logits_BW.float()


class PlainLinears:
    """Linear layers on one input, with their outputs concatenated in one tensor [N, sum of widths], as on the tape."""

    def __init__(self, layers: Sequence[Factors], column: TapeColumn | None) -> None:
        """`column` is the part of the activation tape that records the outputs."""
        self._layers = layers
        self._widths = [len(each.weight) for each in layers]
        self._column = column

    def __call__(self, x_NE: Tensor) -> tuple[Tensor, ...]:
        width = sum(self._widths)
        kept = self._column.rows(len(x_NE)) if self._column is not None else None
        # while the tape records, outputs are written into it directly, without a copy
        block = x_NE.new_empty(len(x_NE), width) if kept is None else kept
        outs: tuple[Tensor, ...] = block.split(self._widths, dim=1)
        for out, each in zip(outs, self._layers, strict=True):
            if each.bias is None:
                torch.mm(x_NE, each.weight.t(), out=out)
            else:
                torch.addmm(each.bias, x_NE, each.weight.t(), out=out)
            add_adapter(out, x_NE, each)
        return outs


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedWeights:
    """The engine's current tensors by name."""

    tensors: Mapping[str, Tensor]
    """Tensors by their names in `models.trainable.factored_weights`."""
    adapter_scale: float = 0.0
    language_path: str = LANGUAGE
    """Module path of the language model."""

    def factors(self, path: str) -> Factors:
        """Return the tensors of the linear layer at this path; KeyError if there is no such layer."""
        down, up = (self.tensors.get(name) for name in adapter_names(path))
        return Factors(self.tensors[f"{path}.weight"], self.tensors.get(f"{path}.bias"), down, up, self.adapter_scale)


Make = Callable[[Sequence[Factors], TapeColumn | None], Linears]
"""Constructor of an implementation of linear layers that share an input, whose outputs the tape records."""


def text_weights(
    named: NamedWeights, shape: DecoderShape, tape: Tape | None = None, make: Make = PlainLinears
) -> TextWeights:
    """Build the language model with one implementation of linear layers; a KeyError names a missing weight."""
    text = named.language_path
    embed = named.tensors[f"{text}.embed_tokens.weight"]
    layers = tuple(
        _layer(named, f"{text}.layers.{index}.", shape, make, NO_COLUMNS if tape is None else tape.layer(index))
        for index in range(shape.num_layers)
    )
    return TextWeights(
        embed=embed,
        decoder=Decoder(layers=layers, norm=_norm(named.tensors[f"{text}.norm.weight"], shape)),
        head=make([Factors(named.tensors.get(HEAD, embed), None)], None),
    )


def _layer(
    named: NamedWeights, prefix: str, shape: DecoderShape, make: Make, columns: Sequence[TapeColumn | None]
) -> DecoderLayer:
    def linears(*names: str, group: LinearGroup) -> Linears:
        return make([named.factors(f"{prefix}{name}") for name in names], columns[group])

    def mixer() -> Mixer:
        if f"{prefix}linear_attn.A_log" in named.tensors:
            net = {name: named.tensors[f"{prefix}linear_attn.{name}"] for name in OF_NET}
            return DeltaNet(
                inputs=linears(
                    *(f"linear_attn.in_proj_{name}" for name in ("qkv", "z", "b", "a")), group=LinearGroup.QKV
                ),
                output=linears("linear_attn.out_proj", group=LinearGroup.OUTPUT),
                conv_C1K=net["conv1d.weight"],
                log_rate_V=net["A_log"],
                decay_bias_V=net["dt_bias"],
                norm_F=net["norm.weight"],
            )
        return SelfAttention(
            query_key_value=linears("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", group=LinearGroup.QKV),
            head_norm=_head_norm(named, prefix, shape),
            output=linears("self_attn.o_proj", group=LinearGroup.OUTPUT),
        )

    def shared_expert() -> SharedExpert | None:
        # Qwen's shared expert has a gate that weights it, and GLM's has none
        of_qwen = f"{prefix}mlp.shared_expert_gate.weight" in named.tensors
        path = "mlp.shared_expert" if of_qwen else "mlp.shared_experts"
        if f"{prefix}{path}.down_proj.weight" not in named.tensors:
            return None
        weight = ["mlp.shared_expert_gate"] if of_qwen else []
        return SharedExpert(
            inputs=linears(f"{path}.gate_proj", f"{path}.up_proj", *weight, group=LinearGroup.GATE_UP),
            down=linears(f"{path}.down_proj", group=LinearGroup.DOWN),
        )

    def norm(name: str) -> Norm | None:
        weight = named.tensors.get(f"{prefix}{name}.weight")
        return None if weight is None else _norm(weight, shape)

    joined = f"{prefix}mlp.gate_up_proj.weight" in named.tensors
    return DecoderLayer(
        input_norm=_norm(named.tensors[f"{prefix}input_layernorm.weight"], shape),
        mixer=mixer(),
        mixed_norm=norm("post_self_attn_layernorm"),
        post_norm=_norm(named.tensors[f"{prefix}post_attention_layernorm.weight"], shape),
        mlp=_experts(named, prefix, shape, shared_expert())
        or GatedMlp(
            gate_up=linears(
                *(["mlp.gate_up_proj"] if joined else ["mlp.gate_proj", "mlp.up_proj"]), group=LinearGroup.GATE_UP
            ),
            down=linears("mlp.down_proj", group=LinearGroup.DOWN),
        ),
        mlp_norm=norm("post_mlp_layernorm"),
    )


def _head_norm(named: NamedWeights, prefix: str, shape: DecoderShape) -> HeadNorm | None:
    query, key = (named.tensors.get(f"{prefix}self_attn.{name}.weight") for name in ("q_norm", "k_norm"))
    assert (query is None) == (key is None), f"{prefix}self_attn has a norm for only queries or only keys"
    if query is None or key is None:
        return None
    return HeadNorm(query, key, shape.norm_eps)


def _experts(named: NamedWeights, prefix: str, shape: DecoderShape, shared: SharedExpert | None) -> Experts | None:
    """Router and experts of a layer, as the trainer's tensors in every implementation; None if it has no experts."""
    router_XE = named.tensors.get(f"{prefix}mlp.gate.weight")
    if router_XE is None:
        return None
    return Experts(
        router_XE=router_XE,
        gate_up_XGE=experts_tensor(named.tensors[f"{prefix}mlp.experts.gate_up_proj"]),
        down_XEF=experts_tensor(named.tensors[f"{prefix}mlp.experts.down_proj"]),
        per_token=shape.experts_per_token,
        shared=shared,
        bias_X=named.tensors.get(f"{prefix}mlp.gate.e_score_correction_bias"),
    )


def _norm(weight: Tensor, shape: DecoderShape) -> Norm:
    kernel = kernels_for(shape).norm
    return lambda x_NE: kernel(x_NE, weight, shape.norm_eps)


class Int8Linears:
    """Linear layers on one input in 8 bits, on CPUs: a third of float32's time, with slightly different log-probs.

    Weights are quantized per output and activations per token, by absolute maximum (Dettmers et al., arXiv 2208.07339,
    section 2.1).
    """

    # quantizing only the weights would be more exact, but torch has no fast kernel for that in float32

    def __init__(self, layers: Sequence[Factors], _column: TapeColumn | None = None) -> None:
        # the layers are one product, so that their input is quantized only once
        weight_OE = torch.cat(list(map(merged_weight, layers)))
        self._widths = [len(each.weight) for each in layers]
        self._weight_OE, self._scale_O = _quantized(weight_OE)
        biases = [each.bias for each in layers if each.bias is not None]
        assert len(biases) in (0, len(layers)), "only some of the joined layers have a bias"
        self._bias_O = torch.cat(biases) if biases else None

    def __call__(self, x_BE: Tensor) -> tuple[Tensor, ...]:
        x_int8_BE, scale_B = _quantized(x_BE)
        out_BO = torch._int_mm(x_int8_BE, self._weight_OE.t()).to(x_BE.dtype)
        out_BO.mul_(scale_B[:, None]).mul_(self._scale_O)
        if self._bias_O is not None:
            out_BO.add_(self._bias_O)
        outs: tuple[Tensor, ...] = out_BO.split(self._widths, dim=1)
        return outs


def _quantized(x_XE: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize rows to 8 bits; returns them with the scale [X] of each."""
    # clamped to avoid a division by zero for a row of zeros
    scale_X = x_XE.abs().amax(dim=1).clamp_(min=torch.finfo(x_XE.dtype).tiny) / INT8_MAX
    return (x_XE / scale_X[:, None]).round_().to(torch.int8), scale_X


def can_use_onednn(like: Tensor) -> bool:
    """True if this build of torch has oneDNN, and oneDNN supports the dtype and device of `like`."""
    if not torch.backends.mkldnn.is_available() or like.is_cuda:
        return False
    return like.dtype == torch.float32 or (like.dtype == torch.bfloat16 and ONEDNN._is_mkldnn_bf16_supported())


class OneDnnLinears:
    """Linear layers on one input as one product, with weights in oneDNN's layout for few rows.

    Products are a fifth faster than torch's in float32, and 1.2 to 1.9 times as fast in bfloat16 on a CPU with AMX.
    """

    # with 32 rows, a matrix product is bound by reading the weights through the CPU's caches; oneDNN reads blocks that
    # are copied once per weights version, at the cost of a second copy in memory

    def __init__(self, layers: Sequence[Factors], column: TapeColumn | None) -> None:
        self._widths = [len(each.weight) for each in layers]
        exact_merge = layers[0].weight.dtype == torch.float32
        self._beside = None if exact_merge else join_adapters(layers)
        weights = [merged_weight(each) if exact_merge else each.weight for each in layers]
        biases = [each.bias for each in layers if each.bias is not None]
        assert len(biases) in (0, len(layers)), "only some of the joined layers have a bias"
        if self._beside is not None:
            weights.append(self._beside.down_RE)
            biases += [self._beside.down_RE.new_zeros(len(self._beside.down_RE))] if biases else []
        weight_OE = torch.cat(weights) if len(weights) > 1 else weights[0]
        # the layers are one product, so that their input is read only once
        self._blocked = ONEDNN._reorder_linear_weight(weight_OE, EXPECTED_ROWS)
        self._bias_O = torch.cat(biases) if biases else None
        self._column = column

    def __call__(self, x_BE: Tensor) -> tuple[Tensor, ...]:
        out_BO: Tensor = ONEDNN._linear_pointwise(x_BE, self._blocked, self._bias_O, "none", [], "")
        if self._beside is not None:
            out_BO = self._beside.added(out_BO)
        kept = self._column.rows(len(x_BE)) if self._column is not None else None
        if kept is not None:
            kept.copy_(out_BO)
        outs: tuple[Tensor, ...] = out_BO.split(self._widths, dim=1)
        return outs


@dataclass(frozen=True, slots=True)
class JoinedAdapters:
    """LoRA adapters of layers that share an input, as two products; `linear_factors.add_adapter` needs two per layer.

    The product with the layers' weights also computes x A' of all adapters.
    """

    down_RE: Tensor
    """Matrices A of the adapters, stacked."""
    up_RO: Tensor
    """Matrices B' of the adapters, as a block diagonal matrix; columns of a layer without an adapter are zero."""
    scale: float

    def added(self, out_BX: Tensor) -> Tensor:
        """Return the outputs [B, O] of the layers with their adapters; `out_BX` [B, O + R] is without adapters."""
        width = self.up_RO.shape[1]
        out_BO, low_BR = out_BX[:, :width], out_BX[:, width:]
        return out_BO.addmm_(low_BR, self.up_RO, alpha=self.scale)


def join_adapters(layers: Sequence[Factors]) -> JoinedAdapters | None:
    """Join the adapters of these layers; None if no layer has one."""
    adapted = [each for each in layers if each.down is not None]
    if not adapted:
        return None
    # a layer without an adapter adds no rows, and columns of zeros
    ups = [each.weight.new_empty(0, len(each.weight)) if each.up is None else each.up.t() for each in layers]
    scales = {each.scale for each in adapted}
    assert len(scales) == 1, f"adapters on one input have different scales: {scales}"
    assert all(each.down is None or each.down.dtype == each.weight.dtype for each in layers), (
        "adapter and weight dtypes differ"
    )
    downs = [each.down for each in adapted if each.down is not None]
    return JoinedAdapters(torch.cat(downs), torch.block_diag(*ups), scales.pop())
