"""Policy losses per action token: PPO clip, GSPO, CISPO, SAPO.

Each loss takes the current log-probs, the log-probs before the update ("old") and the advantages, and returns unreduced
losses: the caller weights and sums them over the batch (`aggregation.py`). Log ratios are clamped to +-20.

lp is the log-prob, A the advantage, r = exp(lp - lp_old) the importance ratio, sg the stop-gradient.

Axes: `A` action tokens of any number of completions, concatenated; `S` completions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from fovea.algorithms.ratio import ratios, sequence_means, spread


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """Unreduced policy loss, the detached importance ratio, and where clipping was active."""

    loss_A: Tensor
    ratio_A: Tensor
    clipped_low_A: Tensor
    clipped_high_A: Tensor


@runtime_checkable
class HasFormula(Protocol):
    """Settings of a loss defined in another package, with its formula."""

    def policy_loss(
        self, logprobs_A: Tensor, old_logprobs_A: Tensor, advantages_A: Tensor, lengths: Sequence[int]
    ) -> PolicyLoss:
        """Compute the unreduced losses; `lengths` is the number of action tokens of each completion."""
        ...


def clipped_loss(
    logprobs_A: Tensor,
    old_logprobs_A: Tensor,
    advantages_A: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> PolicyLoss:
    """PPO's clipped surrogate: max(-A r, -A clamp(r, 1 - low, 1 + high)); dual clip: at most -A dual_clip if A < 0.

    Schulman et al., arXiv 1707.06347; asymmetric bounds ("clip higher"): Yu et al., DAPO, arXiv 2503.14476; dual clip:
    Ye et al., arXiv 1912.09729.
    """
    ratio_A = ratios(logprobs_A - old_logprobs_A)
    return _clipped(ratio_A, advantages_A, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)


def gspo_loss(
    logprobs_A: Tensor,
    old_logprobs_A: Tensor,
    advantages_A: Tensor,
    lengths: Sequence[int],
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> PolicyLoss:
    """The clipped surrogate with a sequence-level ratio s = exp(mean over the completion's tokens of lp - lp_old).

    `lengths` is the number of action tokens of each completion. s is a geometric mean and stays close to 1: the
    paper's clip bounds are 3e-4 and 4e-4. `dual_clip` is as in `clipped_loss`, with s for r; the paper does not have
    it. Zheng et al., GSPO, arXiv 2507.18071, section 4.3 (GSPO-token).
    """
    # sg[s] exp(lp - sg[lp]) has the value of s and the gradient of the token's own log-prob: under the aggregation
    # seq-mean-token-mean these gradients sum to that of s, and per-token advantages remain possible
    log_ratios_S = sequence_means((logprobs_A - old_logprobs_A).detach(), lengths)
    ratio_A = spread(ratios(log_ratios_S), lengths) * (logprobs_A - logprobs_A.detach()).exp()
    return _clipped(ratio_A, advantages_A, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)


def cispo_loss(
    logprobs_A: Tensor,
    old_logprobs_A: Tensor,
    advantages_A: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """CISPO: -sg[clamp(r, 1 - low, 1 + high)] A lp, REINFORCE with a clipped weight; no token loses its gradient.

    `clip_low` of 1 or more means no lower bound, as in the paper's runs. `clipped_*` mark clamped weights for either
    sign of A. MiniMax, MiniMax-M1, arXiv 2506.13585, section 3.1.
    """
    # detached: the ratio is a weight, and the only gradient is that of the log-prob
    ratio_A = ratios(logprobs_A - old_logprobs_A).detach()
    return PolicyLoss(
        loss_A=-ratio_A.clamp(1 - clip_low, 1 + clip_high) * advantages_A * logprobs_A,
        ratio_A=ratio_A,
        clipped_low_A=ratio_A < 1 - clip_low,
        clipped_high_A=ratio_A > 1 + clip_high,
    )


def sapo_loss(
    logprobs_A: Tensor,
    old_logprobs_A: Tensor,
    advantages_A: Tensor,
    *,
    temperature_positive: float,
    temperature_negative: float,
) -> PolicyLoss:
    """SAPO: -A (4 / tau) sigmoid(tau (r - 1)), a soft gate in place of the clip, with slope 1 at r = 1.

    tau is `temperature_positive` if A > 0, else `temperature_negative` (in the paper 1.0 and 1.05); `clipped_*` are
    False everywhere. Gao et al., arXiv 2511.20347.
    """
    ratio_A = ratios(logprobs_A - old_logprobs_A)
    tau_A = torch.full_like(advantages_A, temperature_negative).masked_fill(advantages_A > 0, temperature_positive)
    nowhere_A = torch.zeros_like(ratio_A, dtype=torch.bool)
    return PolicyLoss(
        loss_A=-advantages_A * (4 / tau_A) * torch.sigmoid(tau_A * (ratio_A - 1)),
        ratio_A=ratio_A.detach(),
        clipped_low_A=nowhere_A,
        clipped_high_A=nowhere_A,
    )


def _clipped(
    ratio_A: Tensor, advantages_A: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None
) -> PolicyLoss:
    plain_A = -advantages_A * ratio_A
    clipped_A = -advantages_A * ratio_A.clamp(1 - clip_low, 1 + clip_high)
    loss_A = torch.maximum(plain_A, clipped_A)
    if dual_clip is not None:
        # for A < 0 the clip does not bound -A r: one token that became much more probable could dominate the batch
        bounded_A = torch.minimum(loss_A, -advantages_A * dual_clip)
        loss_A = torch.where(advantages_A < 0, bounded_A, loss_A)
    return PolicyLoss(
        loss_A=loss_A,
        ratio_A=ratio_A.detach(),
        # the clip removes the gradient only where it lowers the objective: below for A < 0, above for A > 0
        clipped_low_A=(ratio_A < 1 - clip_low) & (advantages_A < 0),
        clipped_high_A=(ratio_A > 1 + clip_high) & (advantages_A > 0),
    )
