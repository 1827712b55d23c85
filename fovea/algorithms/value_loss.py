"""The critic's loss, per action; the caller weighs and sums as it does the policy's.

Axes: `A` action tokens, of any number of completions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLoss:
    """Loss of each action, and where the clipped value had the larger error (no gradient once it is out of range)."""

    loss_A: Tensor
    clipped_A: Tensor


def value_loss(values_A: Tensor, old_values_A: Tensor, returns_A: Tensor, *, clip: float | None) -> ValueLoss:
    """0.5 max((V - ret)^2, (clamp(V, V_old - clip, V_old + clip) - ret)^2); without `clip` 0.5 (V - ret)^2.

    `clip` is in units of the return. Schulman et al.'s implementation of PPO (openai/baselines, ppo2); described by
    Huang et al., 2022, "The 37 implementation details of PPO", number 9.
    """
    plain_A = (values_A - returns_A).square()
    if clip is None:
        return ValueLoss(loss_A=0.5 * plain_A, clipped_A=torch.zeros_like(plain_A, dtype=torch.bool))
    near_A = torch.clamp(values_A, old_values_A - clip, old_values_A + clip)
    clipped_A = (near_A - returns_A).square()
    return ValueLoss(loss_A=0.5 * torch.maximum(plain_A, clipped_A), clipped_A=clipped_A > plain_A)


def explained_variance(values_A: Tensor, returns_A: Tensor) -> float:
    """1 - var(ret - V) / var(ret): 1 for a perfect critic, 0 for one that knows the mean alone, below for a worse one.

    0 where all returns are equal (or there is one or none): nothing varies that could be explained.
    """
    returns_A, values_A = returns_A.detach().double(), values_A.detach().double()
    if len(returns_A) < 2 or returns_A.amax() == returns_A.amin():
        return 0.0
    return float(1 - (returns_A - values_A).var() / returns_A.var())
