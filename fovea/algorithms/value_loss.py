"""PPO's clipped value loss per action token, and explained variance.

The loss is unreduced: the caller weights and sums it like the policy loss.

Axes: `A` action tokens of any number of completions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLoss:
    """Unreduced value loss."""

    loss_A: Tensor
    clipped_A: Tensor
    """True where the clipped value has the larger error, so that the token has no gradient."""


def value_loss(values_A: Tensor, old_values_A: Tensor, returns_A: Tensor, *, clip: float | None) -> ValueLoss:
    """Clipped value loss: 0.5 max((V - ret)^2, (clamp(V, V_old - clip, V_old + clip) - ret)^2).

    `clip` is in units of the return; None gives the plain 0.5 (V - ret)^2. From the authors' implementation of PPO
    (openai/baselines, ppo2); described by Huang et al., 2022, "The 37 implementation details of PPO", number 9.
    """
    plain_A = (values_A - returns_A).square()
    if clip is None:
        return ValueLoss(loss_A=0.5 * plain_A, clipped_A=torch.zeros_like(plain_A, dtype=torch.bool))
    near_A = torch.clamp(values_A, old_values_A - clip, old_values_A + clip)
    clipped_A = (near_A - returns_A).square()
    # pessimistic maximum: outside the clip range, a value has a gradient only if it moved away from the return
    return ValueLoss(loss_A=0.5 * torch.maximum(plain_A, clipped_A), clipped_A=clipped_A > plain_A)


def explained_variance(values_A: Tensor, returns_A: Tensor) -> float:
    """1 - var(ret - V) / var(ret), 1 for a perfect critic; 0 if all returns are equal or there are fewer than two."""
    returns_A, values_A = returns_A.detach().double(), values_A.detach().double()
    if len(returns_A) < 2 or returns_A.amax() == returns_A.amin():
        return 0.0
    return float(1 - (returns_A - values_A).var() / returns_A.var())
