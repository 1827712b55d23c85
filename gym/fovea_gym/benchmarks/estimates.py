"""Means over rows with their 95 % confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fovea_gym.utils.stored import Number

Z_95 = 1.959964
"""97.5 % point of the standard normal distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over rows with its 95 % confidence interval."""

    mean: Number
    low: Number
    high: Number
    n: int
    """Number of rows."""


def estimate(values: Sequence[float]) -> Estimate:
    """Mean of accuracies, in 0..1, with the confidence interval that is shown for accuracies everywhere.

    It is Wilson's interval if all values are 0 or 1. Partial credits vary less than right and wrong answers of the same
    mean: theirs is the normal interval of the rows and two more, a 0 and a 1, clipped to 0..1. Without these two, a few
    rows that are all nearly right would suggest that a wrong row is next to impossible. (Agresti and Coull, The
    American Statistician 52, 1998, add four observations to a proportion.) The spread of equal values is not known, so
    they get Wilson's interval, which is never too narrow.
    """
    if not values:
        return Estimate(mean=math.nan, low=math.nan, high=math.nan, n=0)
    n, mean = len(values), float(np.mean(values))
    if _are_shares(values) or len(set(values)) == 1:
        return share_estimate(mean, n)
    found = mean_estimate([*values, 0.0, 1.0])
    return Estimate(mean=mean, low=max(0.0, found.low), high=min(1.0, found.high), n=n)


def share_estimate(fraction: float, n: int) -> Estimate:
    """A share of n rows (n >= 1) with its Wilson interval."""
    low, high = wilson_interval(fraction, n)
    return Estimate(mean=fraction, low=low, high=high, n=n)


def mean_estimate(values: Sequence[float]) -> Estimate:
    """Mean of rewards or their parts, with Wilson's interval if all are 0 or 1, otherwise with the normal one.

    The normal interval is mean +- 1.96 s / sqrt(n), with the sample's standard deviation s (over n - 1). For a single
    value it is (nan, nan).
    """
    n, mean = len(values), float(np.mean(values)) if values else math.nan
    if n and _are_shares(values):
        return share_estimate(mean, n)
    half = Z_95 * float(np.std(values, ddof=1)) / math.sqrt(n) if n > 1 else math.nan
    return Estimate(mean=mean, low=mean - half, high=mean + half, n=n)


def _are_shares(values: Sequence[float]) -> bool:
    return all(value in (0.0, 1.0) for value in values)


def wilson_interval(fraction: float, n: int) -> tuple[float, float]:
    """95 % Wilson score interval of a proportion of n trials; (0, 1) for n = 0.

    Wilson, Probable inference, the law of succession, and statistical inference, JASA 22 (1927) 209-212; recommended by
    Brown, Cai and DasGupta, Statistical Science 16 (2001) 101-133. Conservative for the mean p of values between 0
    and 1, whose variance is at most p (1 - p).
    """
    if n == 0:
        return 0.0, 1.0
    z2 = Z_95**2
    centre = (fraction + z2 / (2 * n)) / (1 + z2 / n)
    half = Z_95 * math.sqrt(fraction * (1 - fraction) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    # with 0 or n successes one bound is exactly 0 or 1, which rounding would miss by 1e-18
    return 0.0 if fraction == 0 else max(0.0, centre - half), 1.0 if fraction == 1 else min(1.0, centre + half)
