"""Layers of transformers' modules with fewer passes over memory: the same numbers, less time.

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
    """As `RmsNorm`; torch's own kernel is fused on CUDA only."""
    if x.is_cuda:
        return F.rms_norm(x, weight.shape, weight, epsilon)
    if not torch.is_grad_enabled():
        x_float = x.float()
        return (x_float * _inverse_rms(x_float, epsilon)).to(x.dtype).mul_(weight)
    normalised: Tensor = RmsNorm.apply(x, weight, epsilon)  # type: ignore[no-untyped-call]
    return normalised


def _embed_patches(module: Any, patches: Tensor) -> Tensor:
    """The patch embedding as the linear layer that it is: its kernel equals its stride.

    Conv3d is 10 times slower here on CPU, and slower still in some CUDA builds.
    """
    weight = module.proj.weight
    return F.linear(patches.to(weight.dtype).flatten(1), weight.flatten(1), module.proj.bias)


def _inverse_rms(x: Tensor, epsilon: float) -> Tensor:
    # the norm is one pass that writes nothing; squares and their mean are two
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()


class RmsNorm(torch.autograd.Function):
    """w x / sqrt(mean(x^2) + eps) over the last axis (Zhang and Sennrich, arXiv 1910.07467), in float32.

    With n = x r and r = 1 / sqrt(mean(x^2) + eps) the gradient of x is r (g w - n mean(g w n)): three passes, where
    autograd through the formula takes eleven.
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
        inner = (product @ weight.to(product.dtype))[..., None] / -normalised.shape[-1]
        of_x = torch.mul(gradient, weight).float().addcmul_(normalised, inner).mul_(scale)
        return of_x.to(gradient.dtype), of_weight, None


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding (Su et al., arXiv 2104.09864) of some tokens, with the halves layout of Qwen.

    [a, b] -> [a cos - b sin, b cos + a sin], or x cos + roll(x) sin' where sin' is -sin in the first half.
    """

    cos_ND: Tensor
    sin_ND: Tensor
    signed_sin_ND: Tensor

    @staticmethod
    def of(cos_ND: Tensor, sin_ND: Tensor) -> Rope:
        first, second = sin_ND.chunk(2, -1)
        return Rope(cos_ND, sin_ND, torch.cat([-first, second], dim=-1))

    def part(self, start: int, end: int) -> Rope:
        """Tokens `start` to `end`."""
        return Rope(self.cos_ND[start:end], self.sin_ND[start:end], self.signed_sin_ND[start:end])


def rotate(query_NHD: Tensor, key_NJD: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
    """Queries and keys turned by their positions."""
    if not torch.is_grad_enabled():
        return (
            _turn(query_NHD, rope.cos_ND, rope.signed_sin_ND),
            _turn(key_NJD, rope.cos_ND, rope.signed_sin_ND),
        )
    query: Tensor = Rotate.apply(query_NHD, rope.cos_ND, rope.signed_sin_ND)  # type: ignore[no-untyped-call]
    key: Tensor = Rotate.apply(key_NJD, rope.cos_ND, rope.signed_sin_ND)  # type: ignore[no-untyped-call]
    return query, key


def silu_times(gate: Tensor, up: Tensor) -> Tensor:
    """The middle of a gated MLP (Shazeer, arXiv 2002.05202)."""
    return F.silu(gate) * up if torch.is_grad_enabled() else F.silu(gate).mul_(up)


class Rotate(torch.autograd.Function):
    """`Rope` with its gradient: what was rolled rolls back, and brings its factor along."""

    @staticmethod
    def forward(ctx: Any, x_NHD: Tensor, cos_ND: Tensor, signed_sin_ND: Tensor) -> Tensor:
        ctx.save_for_backward(cos_ND, signed_sin_ND)
        return _turn(x_NHD, cos_ND, signed_sin_ND)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cos_ND, signed_sin_ND = ctx.saved_tensors
        return _turn(gradients[0], cos_ND, _rolled(signed_sin_ND)), None, None


def _turn(x_NHD: Tensor, cos_ND: Tensor, signed_sin_ND: Tensor) -> Tensor:
    return (x_NHD * cos_ND[:, None]).addcmul_(_rolled(x_NHD), signed_sin_ND[:, None])


def _rolled(x: Tensor) -> Tensor:
    """The halves exchanged."""
    return x.roll(x.shape[-1] // 2, -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The parts of a decoder layer that are neither matrix product nor attention."""

    norm: RmsNormFunction
    rotate: Callable[[Tensor, Tensor, Rope], tuple[Tensor, Tensor]]
    """Of queries [N, H, D] and keys [N, J, D]."""
    gate: Callable[[Tensor, Tensor], Tensor]


TORCH_KERNELS = Kernels(norm=rms_norm, rotate=rotate, gate=silu_times)
