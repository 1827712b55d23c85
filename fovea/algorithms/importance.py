"""Truncated importance sampling, which corrects for log-prob differences between rollout engine and trainer.

Axes: `A` action tokens of any number of completions, concatenated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, assert_never

import torch
from torch import Tensor

from fovea.algorithms.ratio import ratios, sequence_sums, spread

Level = Literal["token", "sequence", "sequence_mask"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportanceWeights:
    """Per-token importance weights without gradient."""

    weights_A: Tensor
    capped_A: Tensor
    """True where the ratio was above the cap, so that it was truncated or its completion masked out."""


def importance_weights(
    old_logprobs_A: Tensor, rollout_logprobs_A: Tensor, lengths: Sequence[int], *, level: Level, cap: float
) -> ImportanceWeights:
    """Importance weights for the policy loss of each token, limited only from above:

        token          min(exp(lp_old - lp_rollout), cap)
        sequence       the product of a completion's token ratios, truncated at cap, on each of its tokens
        sequence_mask  the same product untruncated, and 0 for a completion where it exceeds cap

    `lengths` is the number of action tokens of each completion; log ratios are clamped to +-20. Ionides, 2008; for
    differences between engine and trainer: Yao et al., 2025, "Your efficient RL framework secretly brings you
    off-policy RL training". `sequence_mask` agrees with the mode of that name in TRL 1.16.
    """
    # detached: the weights are constants, and the gradient flows through the policy loss that they multiply
    log_ratios_A = (old_logprobs_A - rollout_logprobs_A).detach()
    if level == "token":
        ratios_A = ratios(log_ratios_A)
    else:
        ratios_A = spread(ratios(sequence_sums(log_ratios_A, lengths)), lengths)
    # no lower bound: small weights are safe, only large weights make the variance of the estimate explode
    above_A = ratios_A > cap
    match level:
        case "token" | "sequence":
            return ImportanceWeights(weights_A=ratios_A.clamp(max=cap), capped_A=above_A)
        case "sequence_mask":
            return ImportanceWeights(weights_A=torch.where(above_A, 0.0, ratios_A), capped_A=above_A)
    assert_never(level)
