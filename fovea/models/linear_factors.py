"""The tensors and the output of a linear layer with or without a LoRA adapter, for both trainer and engine.

Axes: `N` tokens, `E` inputs and `O` outputs of the layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor

from fovea.models.trainable import ADAPTER


@dataclass(frozen=True, slots=True)
class Factors:
    """Tensors of a linear layer x W' + b + scale (x A') B'; A and B are `down` and `up` of a LoRA adapter, or None."""

    weight: Tensor
    bias: Tensor | None
    down: Tensor | None = None
    up: Tensor | None = None
    scale: float = 0.0


def factors_of(module: Any) -> Factors:
    """Tensors of a linear layer with or without an active adapter."""
    if not isinstance(module, LoraLinear):
        return Factors(module.weight, module.bias)
    base: Any = module.get_base_layer()
    if module.disable_adapters:
        return Factors(base.weight, base.bias)
    down: Any = module.lora_A[ADAPTER]
    up: Any = module.lora_B[ADAPTER]
    return Factors(base.weight, base.bias, down.weight, up.weight, float(module.scaling[ADAPTER]))


def add_adapter(out_NO: Tensor, x_NE: Tensor, factors: Factors) -> Tensor:
    """Add scale (x A') B' in place to the output of the layer without its adapter, and return the sum."""
    if factors.down is None or factors.up is None:
        return out_NO
    # adapters may be float32 on bfloat16 weights, but addmm needs a single dtype
    low = x_NE.to(factors.down.dtype) @ factors.down.t()
    if factors.up.dtype == out_NO.dtype:
        return out_NO.addmm_(low, factors.up.t(), alpha=factors.scale)
    return out_NO.add_((low @ factors.up.t()).mul_(factors.scale))


def merged_weight(factors: Factors) -> Tensor:
    """W + scale B A, rounded to the type of W; W itself without an adapter."""
    if factors.down is None or factors.up is None:
        return factors.weight
    delta = torch.mm(factors.up.float(), factors.down.float()).mul_(factors.scale)
    return factors.weight + delta.to(factors.weight.dtype)
