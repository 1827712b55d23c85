"""Advantages: how much better an episode is than its group.

Axes: `P` groups, `G` episodes of a group.
"""

from __future__ import annotations

import torch
from torch import Tensor

STD_EPSILON = 1e-6
SAME_REWARD = 1e-6
"""Rewards of a group closer than this are equal: in float32 the mean of n times 0.1 is not 0.1, and that rest divided
by a standard deviation near zero would be a gradient out of nothing."""


def has_signal(rewards_PG: Tensor) -> Tensor:
    """[P], True where the rewards of a group differ."""
    return rewards_PG.amax(1) - rewards_PG.amin(1) > SAME_REWARD


def group_advantages(rewards_PG: Tensor, *, normalize_by_std: bool) -> Tensor:
    """GRPO: (R - mean) / (std + 1e-6) over each group, std unbiased; exactly 0 where a group's rewards are equal.

    Shao et al., DeepSeekMath, arXiv 2402.03300, section 4.1. Without the division: Liu et al., Dr. GRPO,
    arXiv 2503.20783. A group holds at least two episodes.
    """
    centred_PG = rewards_PG - rewards_PG.mean(1, keepdim=True)
    if normalize_by_std:
        centred_PG = centred_PG / (rewards_PG.std(1, keepdim=True) + STD_EPSILON)
    return torch.where(has_signal(rewards_PG)[:, None], centred_PG, 0.0)
