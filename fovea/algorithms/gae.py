"""Generalised advantage estimation: PPO's advantages, one per action, from a critic's values.

Axes: `B` completions, `T` tokens. The mask is True at actions; tokens between them (padding, or what a tool wrote)
are passed over: what their places hold, NaN included, changes nothing, and they get 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

WHITEN_EPSILON = 1e-8


def gae(
    rewards_BT: Tensor, values_BT: Tensor, mask_BT: Tensor, *, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Advantages and returns [B, T], from the last token to the first:

        delta_t = r_t + gamma V_next - V_t
        A_t     = delta_t + gamma lambda A_next
        return  = A_t + V_t, the critic's target; taken before any whitening

    next is the next ACTION: V_next and A_next are carried through masked tokens unchanged. Past the last action both
    are 0, as an episode ends there. Its reward sits on its last action. Schulman et al., arXiv 1506.02438.
    """
    mask_BT = mask_BT.bool()
    next_value_B = next_advantage_B = values_BT.new_zeros(len(values_BT))
    backwards: list[Tensor] = []
    for rewards_B, values_B, mask_B in zip(
        reversed(rewards_BT.unbind(1)), reversed(values_BT.unbind(1)), reversed(mask_BT.unbind(1)), strict=True
    ):
        delta_B = rewards_B + gamma * next_value_B - values_B
        advantage_B = delta_B + gamma * gae_lambda * next_advantage_B
        next_value_B = torch.where(mask_B, values_B, next_value_B)
        next_advantage_B = torch.where(mask_B, advantage_B, next_advantage_B)
        backwards.append(next_advantage_B)
    advantages_BT = torch.stack(backwards[::-1], 1) if backwards else torch.zeros_like(values_BT)
    return torch.where(mask_BT, advantages_BT, 0.0), torch.where(mask_BT, advantages_BT + values_BT, 0.0)


def whiten(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """(x - mean) * rsqrt(var + 1e-8) over the masked-in places, var unbiased; 0 elsewhere.

    The variance of a single place is 0, so that it gives 0.
    """
    mask_BT = mask_BT.bool()
    num = mask_BT.sum()
    mean = torch.where(mask_BT, x_BT, 0.0).sum() / num.clamp(min=1)
    centred_BT = torch.where(mask_BT, x_BT - mean, 0.0)
    variance = centred_BT.square().sum() / (num - 1).clamp(min=1)
    return centred_BT * (variance + WHITEN_EPSILON).rsqrt()
