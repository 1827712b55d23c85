"""Critic-free advantage estimators (group baselines, both of REINFORCE++), and DAPO's overlong penalty.

Every estimator returns advantages with the shape of its first argument. PPO's estimator, which needs a critic, is in
`gae.py`.

Axes: `P` groups, `G` episodes of a group; `B` completions, `T` tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fovea.algorithms.gae import whiten

STD_EPSILON = 1e-6
# In float32 the mean of n rewards of 0.1 is not exactly 0.1. Dividing that rounding error by a standard deviation near
# zero would turn it into a full-sized advantage, so a group has a signal only if its rewards differ by more than that.
SAME_REWARD = 1e-6


def has_signal(rewards_PG: Tensor) -> Tensor:
    """[P]: True for each group whose rewards differ, and for each group with a reward that is not finite.

    Rewards differ if their range is above a millionth of the group's largest absolute reward.
    """
    range_P = rewards_PG.amax(1) - rewards_PG.amin(1)
    # `not (range <= tolerance)` instead of `range > tolerance`: a NaN must reach the loss, which stops the update, and
    # not become an advantage of 0. The range is tested as well, since an infinite reward has an infinite tolerance
    return ~((range_P <= SAME_REWARD * rewards_PG.abs().amax(1)) & range_P.isfinite())


def grpo(rewards_PG: Tensor) -> Tensor:
    """GRPO advantages (R - mean) / (std + 1e-6) per group, std unbiased; exactly 0 where a group's rewards are equal.

    In groups of one episode, A = R. Shao et al., DeepSeekMath, arXiv 2402.03300, section 4.1.
    """
    if rewards_PG.shape[1] == 1:
        # with its own reward as the baseline, every advantage would be 0
        return rewards_PG
    centred_PG = rewards_PG - rewards_PG.mean(1, keepdim=True)
    return _where_signal(rewards_PG, centred_PG / (rewards_PG.std(1, keepdim=True) + STD_EPSILON))


def dr_grpo(rewards_PG: Tensor) -> Tensor:
    """Dr. GRPO advantages R - mean per group, without GRPO's division; exactly 0 where a group's rewards are equal.

    In groups of one episode, A = R, as in `grpo`. Liu et al., arXiv 2503.20783, who combine it with the aggregation
    `seq-mean-token-sum-norm` and no KL term.
    """
    if rewards_PG.shape[1] == 1:
        return rewards_PG
    return _where_signal(rewards_PG, rewards_PG - rewards_PG.mean(1, keepdim=True))


def rloo(rewards_PG: Tensor) -> Tensor:
    """Leave-one-out advantages: R minus the mean of the other episodes; exactly 0 where a group's rewards are equal.

    Raises ValueError for groups of one. Ahmadian et al., arXiv 2402.14740, section 3.
    """
    num_episodes = rewards_PG.shape[1]
    if num_episodes == 1:
        raise ValueError(
            "rloo compares an episode with the others of its group, but groups of 1 have no others: use 2 or more"
        )
    others_PG = (rewards_PG.sum(1, keepdim=True) - rewards_PG) / (num_episodes - 1)
    return _where_signal(rewards_PG, rewards_PG - others_PG)


def reinforce_plus_plus(returns_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Undiscounted returns (reward minus future KL penalties), whitened over all action tokens of the batch.

    Exactly 0 if all returns are equal. The baseline is the batch, not the group: a group of equal rewards still has
    an advantage, and groups of one are allowed. Hu et al., REINFORCE++, arXiv 2501.03262, the general variant without
    a group baseline; whitening as in `gae.whiten`.
    """
    if not has_signal(returns_BT[mask_BT][None])[0]:
        return torch.zeros_like(returns_BT)
    return whiten(returns_BT, mask_BT)


def reinforce_plus_plus_baseline(rewards_PG: Tensor, lengths_PG: Tensor) -> Tensor:
    """Rewards minus the mean of their group, whitened over all action tokens of the batch.

    `lengths_PG` is the number of action tokens of each episode, its weight in mean and variance: the whitening of
    `gae.whiten` with one value per token. Exactly 0 if no group has a signal. Hu et al., REINFORCE++, arXiv
    2501.03262, the variant with a baseline, for several episodes per prompt. Raises ValueError for groups of one.
    """
    if rewards_PG.shape[1] == 1:
        raise ValueError(
            "reinforce++_baseline compares an episode with its group, but groups of 1 have no others: use 2 or more"
        )
    centred_PG = _where_signal(rewards_PG, rewards_PG - rewards_PG.mean(1, keepdim=True))
    if not has_signal(rewards_PG).any():
        return centred_PG
    tokens_BT = torch.arange(int(lengths_PG.max()))[None] < lengths_PG.flatten()[:, None]
    whitened_BT = whiten(centred_PG.flatten()[:, None].expand(tokens_BT.shape), tokens_BT)
    # all tokens of an episode have the same value; the value of an episode without tokens is not used
    return whitened_BT[:, 0].view_as(rewards_PG)


def _where_signal(rewards_PG: Tensor, advantages_PG: Tensor) -> Tensor:
    return torch.where(has_signal(rewards_PG)[:, None], advantages_PG, 0.0)


def overlong_penalty(length: int, *, max_tokens: int, buffer_tokens: float, factor: float) -> float:
    """Length penalty that falls linearly from 0 at `max_tokens - buffer_tokens` to -factor at `max_tokens`.

    min(-(length - (max - buffer)) / buffer * factor, 0), to be added to the reward. Lengths in tokens, `buffer_tokens`
    at least 1. Yu et al., DAPO, arXiv 2503.14476, section 3.4; its constant case beyond the limit cannot occur, as
    generation stops there.
    """
    excess_tokens = length - (max_tokens - buffer_tokens)
    return min(-excess_tokens / buffer_tokens * factor, 0.0)
