"""AdamW on tensors of torch, as every backend makes it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def make_adamw(
    parameters: Sequence[Tensor], *, betas: tuple[float, float], eps: float, weight_decay: float
) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) with a learning rate of 0, to be set before every step.

    Matrices decay, LoRA's two and a value head's among them. Vectors do not: they are biases, and scales of norms,
    which decay would draw to 0.
    """
    matrices = [parameter for parameter in parameters if parameter.dim() > 1]
    vectors = [parameter for parameter in parameters if parameter.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=0.0, betas=betas, eps=eps, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of all parameter groups."""
    for group in optimizer.param_groups:
        group["lr"] = rate
