"""Fused layers against the modules that they stand in for."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fovea.models.kernels import RmsNorm, rms_norm, use_fused_layers
from fovea.models.tiny import TinyParts


def outputs_and_gradients(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    out = module(x)
    (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
    assert x.grad is not None
    return [out, x.grad, *(p.grad for p in module.parameters() if p.grad is not None)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_layer_equals_its_original(parts: TinyParts, dtype: torch.dtype) -> None:
    parts.network.to(dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2  # one rounding of bfloat16 is 8e-3
    original, fused = parts.network, copy.deepcopy(parts.network)
    use_fused_layers(fused, rms_norm)
    compared = set()
    for (name, module), (_, other) in zip(original.named_modules(), fused.named_modules(), strict=True):
        kind = type(module).__name__
        if not kind.endswith(("RMSNorm", "PatchEmbed")):
            continue
        width = module.proj.weight[0].numel() if kind.endswith("PatchEmbed") else module.weight.shape[0]
        x = torch.randn(6, width, generator=torch.Generator().manual_seed(0)).to(dtype)
        for a, b in zip(outputs_and_gradients(module, x), outputs_and_gradients(other, x), strict=True):
            torch.testing.assert_close(b, a, atol=tolerance, rtol=tolerance, msg=name)
        compared.add(kind)
    assert len(compared) >= 2, compared


def test_the_gradient_is_that_of_the_formula() -> None:
    x = torch.randn(3, 2, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, dtype=torch.float64, requires_grad=True)

    written_out = torch.autograd.functional.jacobian(
        lambda a, w: w * a * torch.rsqrt(a.pow(2).mean(-1, keepdim=True) + 1e-6), (x, weight)
    )
    ours = torch.autograd.functional.jacobian(lambda a, w: RmsNorm.apply(a, w, 1e-6), (x, weight))
    for a, b in zip(ours, written_out, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_a_frozen_weight_gets_no_gradient() -> None:
    x, weight = torch.randn(4, 8, requires_grad=True), torch.ones(8)
    RmsNorm.apply(x, weight, 1e-6).sum().backward()
    assert x.grad is not None
    assert weight.grad is None
