"""Weights for samples that were drawn by another computation than the one that trains on them.

Axes: `A` action tokens, of any number of completions, one completion after the other.
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
    """Of each action, without a gradient, and where the cap took something off."""

    weights_A: Tensor
    capped_A: Tensor


def importance_weights(
    old_logprobs_A: Tensor, rollout_logprobs_A: Tensor, lengths: Sequence[int], *, level: Level, cap: float
) -> ImportanceWeights:
    """What to multiply the policy loss of each action with; no lower bound at any level:

        token          min(exp(lp_old - lp_rollout), cap)
        sequence       the product of the ratios over a completion, at most cap, for each of its actions
        sequence_mask  that product as it is, and 0 for a completion where it is above cap

    `lengths` are the actions of each completion. Logarithms are clamped to +-20. Truncated importance sampling
    (Ionides, 2008; for engines that differ from the trainer: Yao et al., 2025, "Your efficient RL framework secretly
    brings you off-policy RL training"). The mask keeps the ratio of what it keeps, as TRL 1.16's mode of that name.
    """
    log_ratios_A = (old_logprobs_A - rollout_logprobs_A).detach()
    if level == "token":
        ratios_A = ratios(log_ratios_A)
    else:
        ratios_A = spread(ratios(sequence_sums(log_ratios_A, lengths)), lengths)
    above_A = ratios_A > cap
    match level:
        case "token" | "sequence":
            return ImportanceWeights(weights_A=ratios_A.clamp(max=cap), capped_A=above_A)
        case "sequence_mask":
            return ImportanceWeights(weights_A=torch.where(above_A, 0.0, ratios_A), capped_A=above_A)
    assert_never(level)
