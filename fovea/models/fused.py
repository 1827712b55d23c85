"""Layers of transformers' modules with fewer passes over memory: the same numbers, less time.

`tests/models/test_shared_prefix.py` holds the whole model to transformers' own, `test_fused.py` beside it each layer.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def use_fused_layers(network: nn.Module) -> None:
    """Replace the forward of every RMS norm and of the patch embedding in place; parameters stay where they are."""
    for module in network.modules():
        name = type(module).__name__
        if name.endswith("RMSNorm"):
            _replace_forward(module, _norm)
        elif name.endswith("PatchEmbed"):
            _replace_forward(module, _embed_patches)


def _replace_forward(module: nn.Module, forward: Callable[[Any, Tensor], Tensor]) -> None:
    module.forward = types.MethodType(forward, module)


def _norm(module: Any, x: Tensor) -> Tensor:
    if x.is_cuda:  # torch's own kernel is fused there, forward and backward
        return F.rms_norm(x, module.weight.shape, module.weight, module.variance_epsilon)
    normalised: Tensor = RmsNorm.apply(x, module.weight, module.variance_epsilon)  # type: ignore[no-untyped-call]
    return normalised


def _embed_patches(module: Any, patches: Tensor) -> Tensor:
    """The patch embedding as the linear layer that it is: its kernel equals its stride.

    Conv3d is 10 times slower here on CPU, and slower still in some CUDA builds.
    """
    weight = module.proj.weight
    return F.linear(patches.to(weight.dtype).flatten(1), weight.flatten(1), module.proj.bias)


class RmsNorm(torch.autograd.Function):
    """w x / sqrt(mean(x^2) + eps) over the last axis (Zhang and Sennrich, arXiv 1910.07467), in float32.

    With n = x r and r = 1 / sqrt(mean(x^2) + eps) the gradient of x is r (g w - n mean(g w n)): three passes, where
    autograd through the formula takes eleven.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        x_float = x.float()
        scale = torch.rsqrt(torch.linalg.vecdot(x_float, x_float).div_(x.shape[-1]).add_(epsilon))[..., None]
        normalised = x_float * scale
        ctx.save_for_backward(normalised, weight, scale)
        return weight * normalised.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None]:
        normalised, weight, scale = ctx.saved_tensors
        gradient = gradients[0]
        of_weight = (gradient * normalised).flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        of_normalised = (gradient * weight).float()
        inner = torch.linalg.vecdot(of_normalised, normalised)[..., None] / normalised.shape[-1]
        of_x = torch.addcmul(of_normalised, normalised, inner, value=-1).mul_(scale)
        return of_x.to(gradient.dtype), of_weight, None
