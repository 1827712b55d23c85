"""RMSNorm, SwiGLU and patch embedding with fewer passes over memory than transformers' modules.

`tests/models/test_shared_prefix.py` compares the whole model with transformers',
`tests/models/test_kernels.py` compares each layer.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

RmsNormFunction = Callable[[Tensor, Tensor, float], Tensor]
"""(x [..., D], weight [D], epsilon) -> [..., D]"""
ReadSaved = Callable[[], Tensor]
"""Reads the outputs of a linear layer again, so that the backward pass need not keep them."""


class Gate(Protocol):
    """Activation of a gated MLP."""

    def __call__(self, gate: Tensor, up: Tensor, saved: Sequence[ReadSaved] | None = None) -> Tensor:
        """The product [..., F] of activated gate [..., F] and up [..., F]; the readers `saved` read both again."""
        ...


def use_fused_layers(network: nn.Module, norm: RmsNormFunction) -> None:
    """Replace the forward of every RMS norm and of the patch embedding in place; parameters stay where they are."""
    for module in network.modules():
        name = type(module).__name__
        if name.endswith("RMSNorm"):
            _replace_forward(module, partial(_norm, norm))
        elif name.endswith("PatchEmbed"):
            _replace_forward(module, _embed_patches)


def _replace_forward(module: nn.Module, forward: Callable[[Any, Tensor], Tensor]) -> None:
    module.forward = types.MethodType(forward, module)


def _norm(norm: RmsNormFunction, module: Any, x: Tensor) -> Tensor:
    return norm(x, module.weight, norm_epsilon(module))


def norm_epsilon(module: Any) -> float:
    """Epsilon of a transformers RMS norm; the attribute has another name in Qwen3.5."""
    epsilon: float = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
    return epsilon


def centred_norm(norm: RmsNormFunction, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMSNorm whose weight is stored minus 1, as in Qwen3.5; computed in float32."""
    return norm(x.float(), 1 + weight.float(), epsilon).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMSNorm over the last axis (`RmsNorm`), by the fastest implementation for the device."""
    # torch's own kernel is fused on CUDA only
    if x.is_cuda:
        return F.rms_norm(x, weight.shape, weight, epsilon)
    # nothing is saved for a backward pass, so the last product may be in place
    if not torch.is_grad_enabled():
        x_float = x.float()
        return (x_float * inverse_rms(x_float, epsilon)).to(x.dtype).mul_(weight)
    normalised: Tensor = RmsNorm.apply(x, weight, epsilon)  # type: ignore[no-untyped-call]
    return normalised


def _embed_patches(module: Any, patches: Tensor) -> Tensor:
    """Patch embedding as a linear layer, which is equivalent to a convolution whose kernel equals its stride."""
    # Conv3d is 10 times slower here on CPU, and slower still in some CUDA builds
    weight = module.proj.weight
    return F.linear(patches.to(weight.dtype).flatten(1), weight.flatten(1), module.proj.bias)


def inverse_rms(x: Tensor, epsilon: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) over the last axis."""
    # vector_norm reads x once and writes one number per token; x.square().mean() would write all squares first
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()


class RmsNorm(torch.autograd.Function):
    """RMSNorm: w x / sqrt(mean(x^2) + eps) over the last axis (Zhang and Sennrich, arXiv 1910.07467), in float32.

    With n = x r and r = 1 / sqrt(mean(x^2) + eps) the gradient of x is r (g w - n mean(g w n)).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        x_float = x.float()
        scale = inverse_rms(x_float, epsilon)
        normalised = x_float * scale
        ctx.save_for_backward(normalised, weight, scale)
        return weight * normalised.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None]:
        trained = ctx.needs_input_grad[1]
        return *gradients_of_norm(gradients[0], *ctx.saved_tensors, of_weight=trained), None


def gradients_of_norm(
    gradient: Tensor, normalised: Tensor, weight: Tensor, scale: Tensor, *, of_weight: bool
) -> tuple[Tensor, Tensor | None]:
    """Gradients of the inputs of `RmsNorm`, and of its weight if that is trained."""
    product = gradient * normalised
    weight_gradient = product.flatten(0, -2).sum(0).to(weight.dtype) if of_weight else None
    # three passes over [N, D] in all; autograd through the formula would take eleven
    inner = (product @ weight.to(product.dtype))[..., None] / -normalised.shape[-1]
    of_x = torch.mul(gradient, weight).float().addcmul_(normalised, inner).mul_(scale)
    return of_x.to(gradient.dtype), weight_gradient


def silu_times(gate: Tensor, up: Tensor, saved: Sequence[ReadSaved] | None = None) -> Tensor:
    """SwiGLU: silu(gate) up, the activation of a gated MLP (Shazeer, arXiv 2002.05202)."""
    if not torch.is_grad_enabled():
        return F.silu(gate).mul_(up)
    if saved is None:
        # autograd needs silu(gate) for the gradient of `up`
        return F.silu(gate) * up
    product: Tensor = SiluTimes.apply(gate, up, saved)  # type: ignore[no-untyped-call]
    return product


class SiluTimes(torch.autograd.Function):
    """`silu_times` for inputs that can be read again: saves nothing; autograd would save the inputs and silu(gate)."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, saved: Sequence[ReadSaved]) -> Tensor:
        ctx.saved = saved
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        gradient = gradients[0]
        gate, up = (read() for read in ctx.saved)
        of_up = F.silu(gate).mul_(gradient)
        of_gate = torch.ops.aten.silu_backward(gradient * up, gate)
        return of_gate, of_up, None
