"""Generalised advantage estimation (GAE): PPO's per-token advantages from a critic's values, over tokens or turns.

Axes: `B` completions, `T` tokens. The mask is True at action tokens. Masked-out tokens (padding, tool output) are
skipped: their contents, NaN included, do not affect the result, and their advantages and returns are 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

WHITEN_EPSILON = 1e-8


def gae(
    rewards_BT: Tensor,
    values_BT: Tensor,
    mask_BT: Tensor,
    *,
    gamma: float,
    gae_lambda: float,
    ends_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages and value targets (returns), both [B, T], by a backward recursion:

        delta_t = r_t + gamma V_next - V_t
        A_t     = delta_t + gamma lambda A_next
        return  = A_t + V_t, before any whitening

    `next` is the next action token. The episode ends at its last action token, and at tokens where `ends_BT` is True;
    there V_next = A_next = 0. Rewards are per token, the episode's reward on its last action. Schulman et al., arXiv
    1506.02438.
    """
    mask_BT = mask_BT.bool()
    ends_BT = torch.zeros_like(mask_BT) if ends_BT is None else ends_BT
    next_value_B = next_advantage_B = values_BT.new_zeros(len(values_BT))
    backwards: list[Tensor] = []
    columns = (x_BT.unbind(1)[::-1] for x_BT in (rewards_BT, values_BT, mask_BT, ends_BT))
    for rewards_B, values_B, mask_B, ends_B in zip(*columns, strict=True):
        next_value_B, next_advantage_B = (torch.where(ends_B, 0.0, x_B) for x_B in (next_value_B, next_advantage_B))
        delta_B = rewards_B + gamma * next_value_B - values_B
        advantage_B = delta_B + gamma * gae_lambda * next_advantage_B
        # masked-out tokens pass V_next and A_next on unchanged: they are not time steps and get no factor gamma
        next_value_B = torch.where(mask_B, values_B, next_value_B)
        next_advantage_B = torch.where(mask_B, advantage_B, next_advantage_B)
        backwards.append(next_advantage_B)
    advantages_BT = torch.stack(backwards[::-1], 1) if backwards else torch.zeros_like(values_BT)
    return torch.where(mask_BT, advantages_BT, 0.0), torch.where(mask_BT, advantages_BT + values_BT, 0.0)


def turn_ends(mask_BT: Tensor) -> Tensor:
    """[B, T]: True at the last action token of each turn, which precedes a masked-out token or the end of the row."""
    mask_BT = mask_BT.bool()
    return mask_BT & ~torch.nn.functional.pad(mask_BT[:, 1:], (0, 1))


def turn_gae(
    rewards_BT: Tensor,
    values_BT: Tensor,
    mask_BT: Tensor,
    *,
    gamma: float,
    gae_lambda: float,
    turn_gamma: float,
    turn_lambda: float,
) -> tuple[Tensor, Tensor]:
    """Bi-level advantages and value targets, both [B, T]: GAE over turns, then over the tokens within each turn.

        turn k          delta_k = r_k + turn_gamma v_{k+1} - v_k
                        A_k     = delta_k + turn_gamma turn_lambda A_{k+1}
        its last token  A_t     = A_k
        its others      A_t     = r_t + gamma V_{t+1} - V_t + gamma gae_lambda A_{t+1}
        return          A_t + V_t, before any whitening

    r_k and v_k are reward and value of the last token of turn k. Rewards of other tokens, such as a KL penalty, count
    only within their turn. With one turn this is `gae`. Wang et al., VAGEN, arXiv 2510.16907, Bi-Level GAE.
    """
    ends_BT = turn_ends(mask_BT)
    _, targets_BT = gae(rewards_BT, values_BT, ends_BT, gamma=turn_gamma, gae_lambda=turn_lambda)
    # each turn is now treated as an episode whose last reward is the return computed over the turns
    return gae(
        torch.where(ends_BT, targets_BT, rewards_BT),
        values_BT,
        mask_BT,
        gamma=gamma,
        gae_lambda=gae_lambda,
        ends_BT=ends_BT,
    )


def whiten(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Masked whitening: (x - mean) * rsqrt(var + 1e-8), var unbiased (0 for a single token); 0 outside the mask."""
    mask_BT = mask_BT.bool()
    num = mask_BT.sum()
    mean = torch.where(mask_BT, x_BT, 0.0).sum() / num.clamp(min=1)
    # `where` instead of multiplying by the mask: padding may hold NaN, and 0 * NaN is NaN
    centred_BT = torch.where(mask_BT, x_BT - mean, 0.0)
    variance = centred_BT.square().sum() / (num - 1).clamp(min=1)
    return centred_BT * (variance + WHITEN_EPSILON).rsqrt()
