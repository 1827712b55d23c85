"""Confidence intervals, the best of several answers, and the most frequent one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fovea.environments.graders.math_answer import last_boxed
from fovea.evaluation.answer import SampledAnswer

Z_95 = 1.959964
"""97.5 % point of the standard normal distribution."""

NUM_RESAMPLES = 10_000
"""Moves an end of an interval by about 0.01 of its width from seed to seed."""
AT_ONCE = 500
"""Resamples whose counts are in memory together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over rows with its 95 % interval."""

    mean: float
    low: float
    high: float
    n: int
    """Rows."""


def estimate(values: Sequence[float], seed: int = 0) -> Estimate:
    """Mean of values in 0..1 with a bootstrap interval.

    Values that are all 0 or all 1 say nothing by resampling: there it is the score interval (`wilson_interval`).
    """
    mean = float(np.mean(values)) if values else math.nan
    low, high = bootstrap_interval(values, seed)
    if low == high and mean in (0, 1):
        low, high = wilson_interval(mean, len(values))
    return Estimate(mean=mean, low=low, high=high, n=len(values))


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Mean of `second - first` over the same rows, with its 95 % interval."""

    mean: float
    low: float
    high: float
    n: int
    better: int
    """Rows where the second is better."""
    worse: int
    """Rows where it is worse."""


def paired_difference(first: Sequence[float], second: Sequence[float], seed: int = 0) -> Difference:
    """The paired bootstrap: a resample takes a row with both of its values, and so one of their differences.

    Differences that are all equal say nothing by resampling: there as many rows may be otherwise as the score interval
    of none among n allows.
    """
    differences = [b - a for a, b in zip(first, second, strict=True)]
    mean = float(np.mean(differences)) if differences else math.nan
    low, high = bootstrap_interval(differences, seed)
    if low == high:
        unseen = wilson_interval(0.0, len(differences))[1]
        low, high = max(-1.0, low - unseen), min(1.0, high + unseen)
    return Difference(
        mean=mean,
        low=low,
        high=high,
        n=len(differences),
        better=sum(d > 0 for d in differences),
        worse=sum(d < 0 for d in differences),
    )


def bootstrap_interval(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """95 % percentile interval of the mean: Efron and Tibshirani, An Introduction to the Bootstrap (1993), 13.3.

    How often each distinct value is in a resample of n is multinomial, so that only these counts are drawn.
    """
    n = len(values)
    if n == 0:
        return math.nan, math.nan
    distinct, counts = np.unique(np.asarray(values, dtype=np.float64), return_counts=True)
    rng = np.random.default_rng(seed)
    means = [rng.multinomial(n, counts / n, AT_ONCE) @ distinct / n for _ in range(NUM_RESAMPLES // AT_ONCE)]
    low, high = np.quantile(np.concatenate(means), (0.025, 0.975))
    return float(low), float(high)


def best_of(k: int, scores: Sequence[float]) -> float:
    """Unbiased estimate of the best score of k answers, from n >= k of them.

    The mean over all subsets of size k: with s_1 <= ... <= s_n it is the sum of s_i C(i - 1, k - 1) / C(n, k). For
    scores of 0 and 1, c of them 1, that is pass@k = 1 - C(n - c, k) / C(n, k) of Chen et al., arXiv 2107.03374.
    """
    n = len(scores)
    if not 1 <= k <= n:
        raise ValueError(f"the best of {k} answers cannot be told from {n}")
    weighted = (score * math.comb(i, k - 1) for i, score in enumerate(sorted(scores)))
    return sum(weighted) / math.comb(n, k)


def budgets(n: int) -> list[int]:
    """The k of pass@k for n answers: powers of two, and n."""
    return sorted({2**power for power in range(n.bit_length())} | {n}) if n else []


def majority(answers: Sequence[SampledAnswer]) -> SampledAnswer:
    """The answer given most often; of several, the one drawn first, which favours none."""
    votes = Counter(vote(answer.text) for answer in answers)  # keeps the order in which they were first seen
    elected = max(votes, key=votes.__getitem__)
    return next(answer for answer in answers if vote(answer.text) == elected)


def vote(text: str) -> str:
    """What two answers must share to count as one: the last box, else the whole text; spaces and case aside."""
    boxed = last_boxed(text)
    return " ".join((text if boxed is None else boxed).split()).casefold()


def confidence_interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % confidence interval of the mean of independent values in 0..1; (0, 1) if too few to say.

    Values that are all 0 or 1: `wilson_interval`. Others: mean +- z s / sqrt(n) with the sample deviation s
    (of n - 1), the interval of the central limit theorem (NIST/SEMATECH e-Handbook of Statistical Methods,
    1.3.5.2, with z for t), cut to 0..1.
    """
    n, mean = len(values), sum(values) / max(len(values), 1)
    if all(value in (0, 1) for value in values):
        return wilson_interval(mean, n)
    if n < 2:
        return 0.0, 1.0
    variance = sum((value - mean) ** 2 for value in values) / (n - 1)
    half = Z_95 * math.sqrt(variance / n)
    return max(0.0, mean - half), min(1.0, mean + half)


def wilson_interval(fraction: float, n: int) -> tuple[float, float]:
    """95 % score interval of a fraction of n trials; (0, 1) for n = 0.

    Wilson, Probable inference, the law of succession, and statistical inference, JASA 22 (1927) 209-212;
    advised for every n by Brown, Cai and DasGupta, Statistical Science 16 (2001) 101-133. For the mean of
    values between 0 and 1 it is too wide rather than too narrow, as their variance is at most p (1 - p).
    """
    if n == 0:
        return 0.0, 1.0
    z2 = Z_95**2
    centre = (fraction + z2 / (2 * n)) / (1 + z2 / n)
    half = Z_95 * math.sqrt(fraction * (1 - fraction) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return max(0.0, centre - half), min(1.0, centre + half)


def format_interval(interval: tuple[float, float]) -> str:
    """In percent: `[94, 97]`."""
    low, high = interval
    return f"[{100 * low:.0f}, {100 * high:.0f}]"
