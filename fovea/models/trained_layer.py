"""Decoder layers for training: linear layers with LoRA, hand-written gradients, and outputs from the activation tape.

Axes: `N` tokens, `E` input width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn

from fovea.models.activation_tape import LinearGroup
from fovea.models.decoder import DecoderLayer, GatedMlp, LayerCall, SelfAttention, run_layer
from fovea.models.delta_net import DeltaNet
from fovea.models.experts import Experts, SharedExpert
from fovea.models.families.base import AttentionModules, DeltaModules, LayerModules, MlpModules, SharedExpertModules
from fovea.models.heads import HeadNorm
from fovea.models.kernels import ReadSaved, norm_epsilon
from fovea.models.linear_factors import Factors, add_adapter, factors_of
from fovea.models.trainable import ADAPTER

LinearOutputs = Callable[[LinearGroup, slice], Tensor]
"""(group, columns) -> the recorded outputs of linear layers in these columns of their group"""


@dataclass(frozen=True, slots=True)
class TrainedLinears:
    """Linear layers on the same input; with `recorded` outputs the forward pass computes nothing."""

    modules: Sequence[Any]
    group: LinearGroup
    recorded: LinearOutputs | None = None

    def __call__(self, x_NE: Tensor) -> tuple[Tensor, ...]:
        if any(map(drops_inputs, self.modules)):
            assert self.recorded is None, "outputs that were recorded without dropout"
            # peft's own forward samples a separate mask for each layer and for each token of the row
            return tuple(module(x_NE) for module in self.modules)
        factors = [factors_of(module) for module in self.modules]
        recorded = None if self.saved is None else [read() for read in self.saved]
        scales = [each.scale for each in factors]
        tensors = [x for each in factors for x in (each.weight, each.bias, each.down, each.up)]
        outs: tuple[Tensor, ...] = JoinedLinears.apply(  # type: ignore[no-untyped-call]
            x_NE, scales, recorded, *tensors
        )
        return outs

    @property
    def saved(self) -> list[ReadSaved] | None:
        """A reader of each layer's recorded outputs; None without recorded outputs."""
        if self.recorded is None:
            return None
        ends = list(accumulate(module.out_features for module in self.modules))
        columns = [slice(start, end) for start, end in pairwise([0, *ends])]
        return [partial(self.recorded, self.group, each) for each in columns]


def drops_inputs(module: Any) -> bool:
    """True if the layer's adapter applies dropout to its inputs (`model.lora.dropout`), which only updates do."""
    return isinstance(module, LoraLinear) and module.training and isinstance(module.lora_dropout[ADAPTER], nn.Dropout)


def trained_layer(modules: LayerModules, recorded: LinearOutputs | None = None) -> DecoderLayer:
    """A decoder layer that runs with the norms and parameters of these modules."""
    mixer, mlp = modules.mixer, modules.mlp
    return DecoderLayer(
        input_norm=modules.input_norm,
        mixer=_trained_net(mixer) if isinstance(mixer, DeltaModules) else _trained_attention(mixer, recorded),
        mixed_norm=modules.mixed_norm,
        post_norm=modules.post_norm,
        mlp=_trained_experts(mlp, modules.shared_expert) if isinstance(mlp, Experts) else _trained_mlp(mlp, recorded),
        mlp_norm=modules.mlp_norm,
    )


def _trained_attention(modules: AttentionModules, recorded: LinearOutputs | None) -> SelfAttention:
    query_key_value = TrainedLinears((modules.query, modules.key, modules.value), LinearGroup.QKV, recorded)
    return SelfAttention(
        query_key_value=query_key_value,
        saved_qkv=query_key_value.saved,
        head_norm=_head_norm(modules),
        output=TrainedLinears((modules.output,), LinearGroup.OUTPUT, recorded),
    )


def _trained_net(modules: DeltaModules) -> DeltaNet:
    return DeltaNet(
        inputs=TrainedLinears(modules.inputs, LinearGroup.QKV),
        output=TrainedLinears((modules.output,), LinearGroup.OUTPUT),
        conv_C1K=modules.conv_C1K,
        log_rate_V=modules.log_rate_V,
        decay_bias_V=modules.decay_bias_V,
        norm_F=modules.norm_F,
    )


def _head_norm(modules: AttentionModules) -> HeadNorm | None:
    query: Any = modules.query_norm
    key: Any = modules.key_norm
    assert (query is None) == (key is None), "a norm of only queries or only keys"
    return None if query is None else HeadNorm(query.weight, key.weight, norm_epsilon(query))


def _trained_mlp(modules: MlpModules, recorded: LinearOutputs | None) -> GatedMlp:
    gate_up = TrainedLinears(modules.inputs, LinearGroup.GATE_UP, recorded)
    down = TrainedLinears((modules.down,), LinearGroup.DOWN, recorded)
    saved = gate_up.saved
    if saved is not None and len(saved) == 1:
        saved = [partial(_half, saved[0], index) for index in (0, 1)]
    return GatedMlp(gate_up=gate_up, saved_gate_up=saved, down=down)


def _half(read: ReadSaved, index: int) -> Tensor:
    return read().chunk(2, -1)[index]


def _trained_experts(experts: Experts, shared: SharedExpertModules | None) -> Experts:
    if shared is None:
        return experts
    weight = () if shared.weight is None else (shared.weight,)
    inputs = TrainedLinears((*shared.mlp.inputs, *weight), LinearGroup.GATE_UP)
    return replace(
        experts, shared=SharedExpert(inputs=inputs, down=TrainedLinears((shared.mlp.down,), LinearGroup.DOWN))
    )


@dataclass(frozen=True, slots=True)
class TrainedCall:
    """Arguments with which a transformers decoder layer is called in place of its usual ones (`use_layer_calls`)."""

    call: LayerCall
    recorded: LinearOutputs | None


def use_layer_calls(language_model: Any, modules_of: Callable[[Any], LayerModules]) -> None:
    """Make every decoder layer accept `layer(hidden_NE, fovea=TrainedCall(...))`; other calls work as before."""
    # calls still go through the modules, since FSDP2 and gradient checkpointing hook into these
    for layer in language_model.layers:
        if not isinstance(layer.forward, _CallOrForward):
            layer.forward = _CallOrForward(layer, layer.forward, modules_of)


@dataclass(frozen=True, slots=True)
class _CallOrForward:
    """Replacement for a decoder layer's `forward` that dispatches on the argument `fovea`."""

    layer: nn.Module
    forward: Callable[..., Any]
    modules_of: Callable[[Any], LayerModules]

    def __call__(self, hidden_states: Tensor, *args: Any, fovea: TrainedCall | None = None, **kwargs: Any) -> Any:
        if fovea is None:
            return self.forward(hidden_states, *args, **kwargs)
        # set by `models.recompute`
        recompute = getattr(self.layer, "recompute", None)
        if self.layer.training and recompute is not None:
            return recompute(self._run, hidden_states, fovea)
        return self._run(hidden_states, fovea)

    def _run(self, hidden_NE: Tensor, fovea: TrainedCall) -> Tensor:
        return run_layer(trained_layer(self.modules_of(self.layer), fovea.recorded), hidden_NE, fovea.call)


class JoinedLinears(torch.autograd.Function):
    """Several linear layers with LoRA on one input x, as one autograd node that saves x once.

    For W + s B A: dx = g W + s (g B) A, dA = s (g B)' x, dB = s g' (x A').
    """

    @staticmethod
    def forward(
        ctx: Any, x_NE: Tensor, scales: Sequence[float], recorded: Sequence[Tensor] | None, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x_NE, *tensors)
        ctx.scales = scales
        # the backward pass needs only the inputs, so recorded outputs are as good as computed ones
        if recorded is not None:
            return tuple(recorded)
        return tuple(_forward(x_NE, factors) for factors in _factors(tensors, scales))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        x_NE, *tensors = ctx.saved_tensors
        needed = ctx.needs_input_grad
        of_x = x_NE.new_empty(x_NE.shape) if needed[0] else None
        of_tensors: list[Tensor | None] = []
        for index, factors in enumerate(_factors(tensors, ctx.scales)):
            if of_x is not None:
                # summed inside the matrix products; autograd would write one gradient of x per layer and add them
                _add_gradient_of_input(of_x, gradients[index], factors, first=index == 0)
            # the inputs of `forward`: x, scales and recorded, then four tensors for each layer
            start = 3 + 4 * index
            of_tensors += _gradients_of_factors(x_NE, gradients[index], factors, needed[start : start + 4])
        return of_x, None, None, *of_tensors


def _factors(tensors: Sequence[Any], scales: Sequence[float]) -> list[Factors]:
    """Factors of each layer from the flat list of tensors (weight, bias, A, B for each)."""
    fours = (tensors[start : start + 4] for start in range(0, len(tensors), 4))
    return [
        Factors(weight, bias, down, up, scale) for (weight, bias, down, up), scale in zip(fours, scales, strict=True)
    ]


def _forward(x_NE: Tensor, factors: Factors) -> Tensor:
    out_NO = torch.nn.functional.linear(x_NE, factors.weight, factors.bias)
    # a copy, since selective checkpointing keeps the product, and `add_adapter` writes in place
    return out_NO if factors.down is None else add_adapter(out_NO.clone(), x_NE, factors)


def _add_gradient_of_input(of_x: Tensor, gradient: Tensor, factors: Factors, *, first: bool) -> None:
    # beta=0 ignores the contents of the uninitialised tensor
    of_x.addmm_(gradient, factors.weight, beta=0 if first else 1)
    if factors.down is not None and factors.up is not None:
        low = gradient.to(factors.up.dtype) @ factors.up
        if low.dtype == of_x.dtype:
            of_x.addmm_(low, factors.down, alpha=factors.scale)
        else:
            of_x.add_((low @ factors.down).mul_(factors.scale))


def _gradients_of_factors(
    x_NE: Tensor, gradient: Tensor, factors: Factors, needed: Sequence[bool]
) -> list[Tensor | None]:
    """Gradients of weight, bias, A and B; None for those that are not needed."""
    of_weight = gradient.t() @ x_NE if needed[0] else None
    of_bias = gradient.sum(0) if needed[1] else None
    if factors.down is None or factors.up is None or not needed[2]:
        return [of_weight, of_bias, None, None]
    x, gradient = x_NE.to(factors.down.dtype), gradient.to(factors.up.dtype)
    # multiply by the rank-sized factors first, so that no [out, in] matrix is made for the adapter
    of_down = ((gradient @ factors.up).t() @ x).mul_(factors.scale)
    of_up = (gradient.t() @ (x @ factors.down.t())).mul_(factors.scale)
    return [of_weight, of_bias, of_down, of_up]
