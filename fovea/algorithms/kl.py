"""Estimates of the KL divergence between two policies from the actions of one, per action (`A`)."""

from __future__ import annotations

from torch import Tensor

MAX_LOG_RATIO = 20.0
MAX_KL = 10.0


def k3(logprobs_A: Tensor, other_logprobs_A: Tensor) -> Tensor:
    """e^x - x - 1 with x = lp_other - lp, clamped to +-20 and the result to +-10: KL(policy || other), never negative.

    Schulman, "Approximating KL divergence", 2020 (joschu.net/blog/kl-approx.html).
    """
    x_A = (other_logprobs_A - logprobs_A).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    # expm1 keeps the digits that e^x - 1 loses near 0, where rounding would make the estimate negative
    return (x_A.expm1() - x_A).clamp(0.0, MAX_KL)
