"""Monte Carlo estimators of the KL divergence between two policies, and the adaptive KL coefficient.

Each estimates KL(policy || other) for action tokens (axis `A`) sampled from the policy: Schulman, "Approximating KL
divergence", 2020 (joschu.net/blog/kl-approx.html).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch import Tensor

from fovea.algorithms.ratio import clamp_log

# otherwise one token with a probability near 0 under the policy would dominate the mean of k3, which grows as e^x
MAX_KL = 10.0
# bound on the relative error of one controller step, as in Ziegler et al.
MAX_ERROR = 0.2


def k1(logprobs_A: Tensor, other_logprobs_A: Tensor) -> Tensor:
    """lp - lp_other: unbiased, positive or negative. For use in the reward: as a loss, its expected gradient is 0."""
    return logprobs_A - other_logprobs_A


def k2(logprobs_A: Tensor, other_logprobs_A: Tensor) -> Tensor:
    """(lp - lp_other)^2 / 2: biased, non-negative. As an on-policy loss, its expected gradient is that of the KL."""
    return (logprobs_A - other_logprobs_A).square() / 2


def k3(logprobs_A: Tensor, other_logprobs_A: Tensor) -> Tensor:
    """e^x - x - 1 with x = lp_other - lp clamped to +-20, and the result to at most 10: unbiased, non-negative."""
    x_A = clamp_log(other_logprobs_A - logprobs_A)
    # expm1 keeps the digits that e^x - 1 loses near 0, where rounding would make the estimate negative
    return (x_A.expm1() - x_A).clamp(0.0, MAX_KL)


def k3_plus(logprobs_A: Tensor, other_logprobs_A: Tensor) -> Tensor:
    """The value of k3 with the gradient of k2, for use as a loss: both are unbiased on-policy.

    The expected gradient of k3 itself is that of the reverse KL(other || policy). This is k3+ of verl's `kl_penalty`.
    """
    through_A = k2(logprobs_A, other_logprobs_A)
    return k3(logprobs_A, other_logprobs_A).detach() + through_A - through_A.detach()


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3, "k3+": k3_plus}
"""Estimators by the value of `algorithm.kl.estimator`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KlController:
    """Adaptive KL coefficient: a proportional controller. Ziegler et al., arXiv 1909.08593, section 2.2.

    `target` is the target KL in nats; None keeps the coefficient constant. `horizon` is in samples: with the largest
    allowed error, the coefficient changes by about 20 % per horizon.
    """

    coef: float
    target: float | None
    horizon: int

    def after(self, kl: float, num_samples: int) -> KlController:
        """The controller after a step of n samples: coef *= 1 + clip(kl/target - 1, -0.2, 0.2) * n/horizon.

        Raises ValueError if the KL is not finite, or if n is five horizons or more, since the coefficient could then
        become 0 or negative.
        """
        if self.target is None:
            return self
        if not math.isfinite(kl):
            raise ValueError(f"the KL of the step is {kl}, but the controller needs a finite one; skip this step")
        if num_samples * MAX_ERROR >= self.horizon:
            raise ValueError(
                f"a horizon of {self.horizon} samples for steps of {num_samples} can turn the KL coefficient to 0 or "
                f"below: set it above {math.floor(num_samples * MAX_ERROR)}"
            )
        error = min(max(kl / self.target - 1, -MAX_ERROR), MAX_ERROR)
        return replace(self, coef=self.coef * (1 + error * num_samples / self.horizon))


def next_kl_coef(coef: float, kl: float | None, *, target: float, horizon_samples: int, num_samples: int) -> float:
    """The coefficient after a step of `num_samples` with this KL; unchanged without a finite KL."""
    if kl is None or not math.isfinite(kl):
        return coef
    return KlController(coef=coef, target=target, horizon=horizon_samples).after(kl, num_samples).coef
