"""The clipped policy loss, per action; the caller sums and divides by the tokens of the whole batch.

Axes: `A` action tokens, of any number of completions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""exp overflows past 88; a ratio anywhere near e^20 is a mismatch that the metrics show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """Loss of each action, and where the clip took hold."""

    loss_A: Tensor
    ratio_A: Tensor
    clipped_low_A: Tensor
    clipped_high_A: Tensor


def clipped_loss(
    logprobs_A: Tensor,
    old_logprobs_A: Tensor,
    advantages_A: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> PolicyLoss:
    """L = max(-A r, -A clamp(r, 1 - low, 1 + high)), and for A < 0 at most -A dual_clip; r = exp(lp - lp_old).

    Schulman et al., arXiv 1707.06347; separate bounds: Yu et al., DAPO, arXiv 2503.14476; the bound for negative
    advantages: Ye et al., arXiv 1912.09729.
    """
    ratio_A = (logprobs_A - old_logprobs_A).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    plain_A = -advantages_A * ratio_A
    clipped_A = -advantages_A * ratio_A.clamp(1 - clip_low, 1 + clip_high)
    loss_A = torch.maximum(plain_A, clipped_A)
    if dual_clip is not None:
        bounded_A = torch.minimum(loss_A, -advantages_A * dual_clip)
        loss_A = torch.where(advantages_A < 0, bounded_A, loss_A)
    return PolicyLoss(
        loss_A=loss_A,
        ratio_A=ratio_A.detach(),
        clipped_low_A=(ratio_A < 1 - clip_low) & (advantages_A < 0),
        clipped_high_A=(ratio_A > 1 + clip_high) & (advantages_A > 0),
    )
