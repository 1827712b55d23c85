"""RMSNorm, rotary positions, SwiGLU and patch embedding with fewer passes over memory than transformers' modules.

`tests/models/shared_prefix/test_shared_prefix.py` holds the whole model to transformers' own,
`tests/models/test_kernels.py` each layer.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

RmsNormFunction = Callable[[Tensor, Tensor, float], Tensor]
"""(x [..., D], weight [D], epsilon) -> [..., D]"""
Gate = Callable[[Tensor, Tensor], Tensor]
"""Activation of a gated MLP: (gate [..., F], up [..., F]) -> [..., F]"""


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
    return norm(x, module.weight, module.variance_epsilon)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMSNorm over the last axis (`RmsNorm`), by the fastest implementation for the device."""
    # torch's own kernel is fused on CUDA only
    if x.is_cuda:
        return F.rms_norm(x, weight.shape, weight, epsilon)
    # nothing is saved for a backward pass, so the last product may overwrite
    if not torch.is_grad_enabled():
        x_float = x.float()
        return (x_float * _inverse_rms(x_float, epsilon)).to(x.dtype).mul_(weight)
    normalised: Tensor = RmsNorm.apply(x, weight, epsilon)  # type: ignore[no-untyped-call]
    return normalised


def _embed_patches(module: Any, patches: Tensor) -> Tensor:
    """Patch embedding as a linear layer, which a convolution is whose kernel equals its stride."""
    # Conv3d is 10 times slower here on CPU, and slower still in some CUDA builds
    weight = module.proj.weight
    return F.linear(patches.to(weight.dtype).flatten(1), weight.flatten(1), module.proj.bias)


def _inverse_rms(x: Tensor, epsilon: float) -> Tensor:
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
        scale = _inverse_rms(x_float, epsilon)
        normalised = x_float * scale
        ctx.save_for_backward(normalised, weight, scale)
        return weight * normalised.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None]:
        normalised, weight, scale = ctx.saved_tensors
        gradient = gradients[0]
        product = gradient * normalised
        of_weight = product.flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        # three passes over [N, D] in all, where autograd through the formula takes eleven
        inner = (product @ weight.to(product.dtype))[..., None] / -normalised.shape[-1]
        of_x = torch.mul(gradient, weight).float().addcmul_(normalised, inner).mul_(scale)
        return of_x.to(gradient.dtype), of_weight, None


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding (Su et al., arXiv 2104.09864) of N tokens, in the half-rotated layout of Qwen.

    [a, b] -> [a cos - b sin, b cos + a sin], or x cos + roll(x) sin' where sin' is -sin in the first half.
    """

    cos_ND: Tensor
    sin_ND: Tensor
    signed_sin_ND: Tensor

    @staticmethod
    def of(cos_ND: Tensor, sin_ND: Tensor) -> Rope:
        """The embedding with these cosines and sines."""
        # the sign goes into the sine once per pass, instead of into a rotated copy of every query and key
        first, second = sin_ND.chunk(2, -1)
        return Rope(cos_ND, sin_ND, torch.cat([-first, second], dim=-1))

    def part(self, start: int, end: int) -> Rope:
        """The embedding of tokens `start` to `end`."""
        return Rope(self.cos_ND[start:end], self.sin_ND[start:end], self.signed_sin_ND[start:end])


def rotate(query_NHD: Tensor, key_NJD: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
    """Queries and keys with rotary positions applied."""
    if not torch.is_grad_enabled():
        return (
            _turn(query_NHD, rope.cos_ND, rope.signed_sin_ND),
            _turn(key_NJD, rope.cos_ND, rope.signed_sin_ND),
        )
    query: Tensor = Rotate.apply(query_NHD, rope.cos_ND, rope.signed_sin_ND)  # type: ignore[no-untyped-call]
    key: Tensor = Rotate.apply(key_NJD, rope.cos_ND, rope.signed_sin_ND)  # type: ignore[no-untyped-call]
    return query, key


def silu_times(gate: Tensor, up: Tensor) -> Tensor:
    """SwiGLU: silu(gate) up, the activation of a gated MLP (Shazeer, arXiv 2002.05202)."""
    # autograd needs silu(gate) for the gradient of `up`
    return F.silu(gate) * up if torch.is_grad_enabled() else F.silu(gate).mul_(up)


class Rotate(torch.autograd.Function):
    """Applies `Rope`, with a written-out gradient that saves no activations."""

    @staticmethod
    def forward(ctx: Any, x_NHD: Tensor, cos_ND: Tensor, signed_sin_ND: Tensor) -> Tensor:
        ctx.save_for_backward(cos_ND, signed_sin_ND)
        return _turn(x_NHD, cos_ND, signed_sin_ND)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        # y = x cos + roll(x) s, so dx = g cos + roll(g s) = g cos + roll(g) roll(s): the same function, sines rolled
        cos_ND, signed_sin_ND = ctx.saved_tensors
        return _turn(gradients[0], cos_ND, _rolled(signed_sin_ND)), None, None


def _turn(x_NHD: Tensor, cos_ND: Tensor, signed_sin_ND: Tensor) -> Tensor:
    return (x_NHD * cos_ND[:, None]).addcmul_(_rolled(x_NHD), signed_sin_ND[:, None])


def _rolled(x: Tensor) -> Tensor:
    """The last axis with its halves exchanged."""
    return x.roll(x.shape[-1] // 2, -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Elementwise kernels of a decoder layer: RMSNorm, rotary positions and SwiGLU."""

    norm: RmsNormFunction
    rotate: Callable[[Tensor, Tensor, Rope], tuple[Tensor, Tensor]]
    """(queries [N, H, D], keys [N, J, D], positions) -> rotated queries and keys"""
    gate: Gate


TORCH_KERNELS = Kernels(norm=rms_norm, rotate=rotate, gate=silu_times)
