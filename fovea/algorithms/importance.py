"""Weights for samples that were drawn by another computation than the one that trains on them.

Axes: `A` action tokens, of any number of completions.
"""

from __future__ import annotations

from torch import Tensor


def truncated_weights(old_logprobs_A: Tensor, rollout_logprobs_A: Tensor, *, cap: float) -> Tensor:
    """min(exp(lp_old - lp_rollout), cap) per token, without a gradient; multiplies the clipped loss.

    Truncated importance sampling (Ionides, 2008; for engines that differ from the trainer: Yao et al., 2025, "Your
    efficient RL framework secretly brings you off-policy RL training").
    """
    return (old_logprobs_A - rollout_logprobs_A).detach().exp().clamp(max=cap)
