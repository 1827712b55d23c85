"""AdamW on tensors of torch, as every backend makes it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

RATE_RATIO = "rate_ratio"
"""Key of a parameter group: its learning rate relative to the optimizer's."""


def make_adamw(
    parameters: Sequence[Tensor],
    *,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    rate_ratios: Sequence[float] | None = None,
) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) with a learning rate of 0, to be set before every step.

    Matrices decay, LoRA's two and a value head's among them. Vectors do not: they are biases, and scales of norms,
    which decay would draw to 0. `rate_ratios` are learning rates of parameters relative to the optimizer's; default: 1.
    """
    groups: dict[tuple[bool, float], list[Tensor]] = {}
    for parameter, ratio in zip(parameters, rate_ratios or [1.0] * len(parameters), strict=True):
        groups.setdefault((parameter.dim() > 1, ratio), []).append(parameter)
    given = [
        {"params": members, "weight_decay": weight_decay if are_matrices else 0.0, RATE_RATIO: ratio}
        for (are_matrices, ratio), members in groups.items()
    ]
    return torch.optim.AdamW(given, lr=0.0, betas=betas, eps=eps, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of an optimizer of `make_adamw`: each group's is `rate` times its ratio."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group[RATE_RATIO]
