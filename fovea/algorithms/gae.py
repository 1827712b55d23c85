"""Generalised advantage estimation (GAE): PPO's per-token advantages from a critic's values.

Axes: `B` completions, `T` tokens. The mask is True at action tokens. Masked-out tokens (padding, tool output) are
skipped: their contents, NaN included, do not affect the result, and their advantages and returns are 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

WHITEN_EPSILON = 1e-8


def gae(
    rewards_BT: Tensor, values_BT: Tensor, mask_BT: Tensor, *, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Advantages and value targets (returns), both [B, T], by a backward recursion:

        delta_t = r_t + gamma V_next - V_t
        A_t     = delta_t + gamma lambda A_next
        return  = A_t + V_t, before any whitening

    `next` is the next action token. The episode ends with the last one, where V_next = A_next = 0; rewards arrive per
    token, the episode's on its last action. Schulman et al., arXiv 1506.02438.
    """
    mask_BT = mask_BT.bool()
    next_value_B = next_advantage_B = values_BT.new_zeros(len(values_BT))
    backwards: list[Tensor] = []
    for rewards_B, values_B, mask_B in zip(
        reversed(rewards_BT.unbind(1)), reversed(values_BT.unbind(1)), reversed(mask_BT.unbind(1)), strict=True
    ):
        delta_B = rewards_B + gamma * next_value_B - values_B
        advantage_B = delta_B + gamma * gae_lambda * next_advantage_B
        # masked-out tokens pass V_next and A_next through unchanged and are not time step: no factor gamma for them
        next_value_B = torch.where(mask_B, values_B, next_value_B)
        next_advantage_B = torch.where(mask_B, advantage_B, next_advantage_B)
        backwards.append(next_advantage_B)
    advantages_BT = torch.stack(backwards[::-1], 1) if backwards else torch.zeros_like(values_BT)
    return torch.where(mask_BT, advantages_BT, 0.0), torch.where(mask_BT, advantages_BT + values_BT, 0.0)


def whiten(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Masked whitening: (x - mean) * rsqrt(var + 1e-8) over the tokens in the mask, var unbiased; 0 elsewhere.

    A single token has variance 0 and becomes 0.
    """
    mask_BT = mask_BT.bool()
    num = mask_BT.sum()
    mean = torch.where(mask_BT, x_BT, 0.0).sum() / num.clamp(min=1)
    # where, not a product with the mask: 0 * NaN is NaN, and padding may hold NaN
    centred_BT = torch.where(mask_BT, x_BT - mean, 0.0)
    variance = centred_BT.square().sum() / (num - 1).clamp(min=1)
    return centred_BT * (variance + WHITEN_EPSILON).rsqrt()
