"""How much better an episode is than its group, or an action than its step.

Every function gives advantages of the shape that it takes. PPO's, from a critic, are in `gae.py`.

Axes: `P` groups, `G` episodes of a group; `B` completions, `T` tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fovea.algorithms.gae import whiten

STD_EPSILON = 1e-6
SAME_REWARD = 1e-6
"""Rewards of a group closer than this are equal: in float32 the mean of n times 0.1 is not 0.1, and that rest divided
by a standard deviation near zero would be a gradient out of nothing."""


def has_signal(rewards_PG: Tensor) -> Tensor:
    """[P], True where the rewards of a group differ, or are not finite: that must not look like a 0."""
    return ~(rewards_PG.amax(1) - rewards_PG.amin(1) <= SAME_REWARD)


def grpo(rewards_PG: Tensor) -> Tensor:
    """(R - mean) / (std + 1e-6) over each group, std unbiased; exactly 0 where a group's rewards are equal.

    A group of one episode has nothing to be compared with: A = R. Shao et al., DeepSeekMath, arXiv 2402.03300,
    section 4.1.
    """
    if rewards_PG.shape[1] == 1:
        return rewards_PG
    centred_PG = rewards_PG - rewards_PG.mean(1, keepdim=True)
    return _where_signal(rewards_PG, centred_PG / (rewards_PG.std(1, keepdim=True) + STD_EPSILON))


def dr_grpo(rewards_PG: Tensor) -> Tensor:
    """R - mean over each group; exactly 0 where a group's rewards are equal.

    A group of one episode: A = R, as in `grpo`. Liu et al., Dr. GRPO, arXiv 2503.20783, who sum its losses by
    `seq-mean-token-sum-norm` and leave the KL term out.
    """
    if rewards_PG.shape[1] == 1:
        return rewards_PG
    return _where_signal(rewards_PG, rewards_PG - rewards_PG.mean(1, keepdim=True))


def rloo(rewards_PG: Tensor) -> Tensor:
    """R - mean of the OTHER episodes of the group; exactly 0 where a group's rewards are equal.

    Raises ValueError for groups of one, which have no others. Ahmadian et al., arXiv 2402.14740, section 3.
    """
    num_episodes = rewards_PG.shape[1]
    if num_episodes == 1:
        raise ValueError(
            "rloo compares an episode with the others of its group, and groups of 1 have none: use 2 or more"
        )
    others_PG = (rewards_PG.sum(1, keepdim=True) - rewards_PG) / (num_episodes - 1)
    return _where_signal(rewards_PG, rewards_PG - others_PG)


def reinforce_plus_plus(returns_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """What each action still gets (the reward, less the KL from there on), whitened over ALL actions of the step.

    Exactly 0 where all returns are equal. A group without signal of its own does get an advantage, by how it did beside
    the other groups; groups of one are fine. Hu et al., REINFORCE++, arXiv 2501.03262: the general variant, without a
    group baseline; whitening as in `gae.whiten`.
    """
    if not has_signal(returns_BT[mask_BT][None])[0]:
        return torch.zeros_like(returns_BT)
    return whiten(returns_BT, mask_BT)


def _where_signal(rewards_PG: Tensor, advantages_PG: Tensor) -> Tensor:
    return torch.where(has_signal(rewards_PG)[:, None], advantages_PG, 0.0)


def overlong_penalty(length: int, *, max_tokens: int, buffer_tokens: float, factor: float) -> float:
    """min(-(length - (max - buffer)) / buffer * factor, 0): 0 up to the buffer, -factor at the limit.

    To be added to the reward. Lengths in tokens, `buffer_tokens` at least 1. Yu et al., DAPO, arXiv 2503.14476,
    section 3.4, whose last case, a constant beyond the limit, does not occur where generation ends at it.
    """
    excess_tokens = length - (max_tokens - buffer_tokens)
    return min(-excess_tokens / buffer_tokens * factor, 0.0)
