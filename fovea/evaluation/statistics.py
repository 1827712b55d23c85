"""Confidence intervals, pass@k and majority vote."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from fovea.evaluation.records import RecordedEpisode
from fovea.types import Evaluation, Metrics
from fovea_gym.benchmarks.estimates import Estimate, estimate, mean_estimate, wilson_interval
from fovea_gym.graders.math_answer import last_boxed, same_answer

# with this number, the ends of an interval vary between seeds by about 0.01 of its width
NUM_RESAMPLES = 10_000
RESAMPLES_PER_CHUNK = 500
"""Number of resamples in memory at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The mean paired difference `second - first` over the same rows, with its 95 % confidence interval."""

    mean: float
    low: float
    high: float
    n: int
    better: int
    """Number of rows where the second is better."""
    worse: int
    """Number of rows where the second is worse."""


def paired_difference(first: Sequence[float], second: Sequence[float], seed: int = 0) -> Difference:
    """The mean difference with its paired bootstrap interval, which resamples rows together with both values."""
    differences = [b - a for a, b in zip(first, second, strict=True)]
    mean = float(np.mean(differences)) if differences else math.nan
    low, high = bootstrap_interval(differences, seed)
    if low == high:
        # All differences are equal, so the bootstrap interval has width 0. Widen it by the largest share of differing
        # rows that is consistent with 0 of n rows differing: the upper end of the Wilson interval.
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
    """The 95 % percentile bootstrap interval of the mean; (nan, nan) without values.

    Efron and Tibshirani, An Introduction to the Bootstrap (1993), 13.3.
    """
    n = len(values)
    if n == 0:
        return math.nan, math.nan
    distinct, counts = np.unique(np.asarray(values, dtype=np.float64), return_counts=True)
    rng = np.random.default_rng(seed)
    # The counts of the distinct values in a resample are multinomial. Accuracies have few distinct values, so that
    # sampling the counts costs far less than sampling n rows.
    chunks = range(NUM_RESAMPLES // RESAMPLES_PER_CHUNK)
    means = [rng.multinomial(n, counts / n, RESAMPLES_PER_CHUNK) @ distinct / n for _ in chunks]
    low, high = np.quantile(np.concatenate(means), (0.025, 0.975))
    return float(low), float(high)


def best_of(k: int, scores: Sequence[float]) -> float:
    """Unbiased estimate of the expected best score of k answers from n >= k answers; pass@k if scores are 0 or 1.

    The mean of the maximum over all subsets of size k: for s_1 <= ... <= s_n, sum_i s_i C(i - 1, k - 1) / C(n, k). With
    c scores of 1 and the rest 0 it equals 1 - C(n - c, k) / C(n, k), pass@k of Chen et al., arXiv 2107.03374. Raises
    ValueError unless 1 <= k <= n.
    """
    n = len(scores)
    if not 1 <= k <= n:
        raise ValueError(f"the best of {k} answers cannot be estimated from {n}; choose k from 1 to {n}")
    # divide the integers first: for a thousand answers they exceed the range of a float
    subsets = math.comb(n, k)
    return math.fsum(score * (math.comb(i, k - 1) / subsets) for i, score in enumerate(sorted(scores)))


def budgets(n: int) -> list[int]:
    """The values of k for which pass@k is reported, given n answers: powers of two up to n, and n itself."""
    return sorted({2**power for power in range(n.bit_length())} | {n}) if n else []


def majority(answers: Sequence[RecordedEpisode]) -> RecordedEpisode:
    """The answer with the most votes; equal answers are counted together, and ties go to the answer sampled first."""
    # samples come in random order, so the tie-break favours no answer; Counter keeps the order of first occurrence
    spelled = Counter(vote(answer.text) for answer in answers)
    votes: Counter[str] = Counter()
    for text, count in spelled.items():
        votes[next((other for other in votes if same_answer(text, other)), text)] += count
    elected = max(votes, key=votes.__getitem__)
    return next(answer for answer in answers if vote(answer.text) == elected)


def vote(text: str) -> str:
    """The normalised answer for a majority vote: the last `\\boxed{}`, else the whole text; case and spacing folded."""
    boxed = last_boxed(text)
    return " ".join((text if boxed is None else boxed).split()).casefold()


def half_up(value: float) -> float:
    """The value nudged upwards, so that formatting rounds ties up: 33.25 becomes 33.3, not 33.2."""
    return value * (1 + 1e-12)


def percent(fraction: float) -> str:
    """A fraction as text in percent with one decimal, such as `33.3`."""
    return f"{half_up(100 * fraction):.1f}"


def format_interval(interval: tuple[float, float]) -> str:
    """A fraction interval as text in percent, such as `[94, 97]` or `[0, 0.5]`."""
    low, high = (_percent(100 * bound) for bound in interval)
    return f"[{low}, {high}]"


def _percent(value: float) -> str:
    """A percentage without decimals, except next to 0 and 100: a bound prints as 0 or 100 only if it is exact."""
    is_near_an_end = 0 < round(value, 1) < 1 or 99 < round(value, 1) < 100
    return f"{value:.1f}" if is_near_an_end else f"{value:.0f}"


def mean_text(value: Estimate | Difference | None) -> str:
    """A mean with its interval, as `0.512 [0.48, 0.54]` or `1,312 [1,250, 1,375]`; empty if undefined."""
    if value is None or math.isnan(value.mean):
        return ""
    interval = f" [{_short(value.low)}, {_short(value.high)}]" if math.isfinite(value.low) else ""
    return f"{_short(value.mean)}{interval}"


def _short(value: float) -> str:
    """Three significant digits; thousands, such as distances in km, are written without an exponent."""
    value = half_up(value)
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"


def percent_text(value: Estimate | Difference | None) -> str:
    """An estimate as `87.5 [83, 91]` or a difference as `+3.8 [+0.4, +7.2]`, in percent; empty if undefined."""
    if value is None or math.isnan(value.mean):
        return ""
    if isinstance(value, Estimate):
        return f"{percent(value.mean)} {format_interval((value.low, value.high))}"
    mean, low, high = (half_up(100 * each) for each in (value.mean, value.low, value.high))
    return f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]"


T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Means over the rows of an evaluation with their 95 % intervals."""

    accuracy: Estimate
    by_type: Mapping[str, Estimate]
    """Accuracy by question type."""
    by_image_type: Mapping[str, Estimate]
    """Accuracy by image type; empty without `evaluate.image_type_key`."""
    reward: Estimate | None
    """Mean reward; None if no reward was recorded."""
    parts: Mapping[str, Estimate]
    """Mean of each named part of the reward, over the rows that have it."""
    rows_unscored: int = 0
    """Number of rows left out because their grader could not score them."""


def figures_of(evaluation: Evaluation) -> Figures:
    """Compute the figures of an evaluation: Wilson intervals for shares of rows, normal ones for other means."""
    return Figures(
        accuracy=estimate([value for values in evaluation.accuracies.values() for value in values]),
        by_type=_each(evaluation.accuracies),
        by_image_type=_each(evaluation.by_image_type),
        reward=mean_estimate(evaluation.rewards) if evaluation.rewards else None,
        parts={name: mean_estimate(values) for name, values in evaluation.parts.items()},
        rows_unscored=evaluation.num_unscored,
    )


def parts_of(answers: Iterable[RecordedEpisode]) -> dict[str, tuple[float, ...]]:
    """The values of each named part of the reward over the answers that have it, in sorted order of the names."""
    values = defaultdict[str, list[float]](list)
    for answer in answers:
        for name, value in answer.parts.items():
            values[name].append(value)
    return {name: tuple(values[name]) for name in sorted(values)}


def shown_once(stages: Sequence[Mapping[str, T]]) -> dict[str, str]:
    """Labels of figures by name; a figure that equals an earlier one in every stage is joined to that one's label."""
    labels, first_of = dict[str, str](), list[tuple[list[T | None], str]]()
    for name in stages[-1]:
        values = [figures.get(name) for figures in stages]
        first = next((other for known, other in first_of if known == values), None)
        if first is None:
            first_of.append((values, name))
            labels[name] = name
        else:
            labels[first] += f", {name}"
    return labels


def dev_metrics(dev: Evaluation) -> Metrics:
    """Figures of a dev evaluation as metrics: `accuracy/dev`, `dev/reward/<part>`, bounds `dev_low/reward`, ..."""
    figures = figures_of(dev)
    metrics = {"accuracy/dev": figures.accuracy.mean}
    if len(figures.by_type) > 1:
        metrics |= {f"accuracy/dev/{kind}": value.mean for kind, value in figures.by_type.items()}
    if dev.num_unscored:
        metrics["accuracy/dev_unscored"] = float(dev.num_unscored)
    named = {f"reward/{name}": value for name, value in figures.parts.items()}
    named |= {f"accuracy/{name}": value for name, value in figures.by_image_type.items()}
    named |= {"reward": figures.reward} if figures.reward else {}
    metrics |= {f"dev/{name}": value.mean for name, value in named.items()}
    for name, value in ({"accuracy": figures.accuracy} | named).items():
        if math.isfinite(value.low):
            metrics |= {f"dev_low/{name}": value.low, f"dev_high/{name}": value.high}
    return metrics


def sampled_dev_metrics(accuracies: Sequence[Sequence[float]]) -> Metrics:
    """`dev/mean@n` and `dev/pass@n` from the accuracies of n answers to each row; empty without rows."""
    if not accuracies:
        return {}
    n = len(accuracies[0])
    best = [best_of(n, of_row) for of_row in accuracies]
    return {f"dev/mean@{n}": float(np.mean(accuracies)), f"dev/pass@{n}": float(np.mean(best))}


def _each(values: Mapping[str, Sequence[float]]) -> dict[str, Estimate]:
    return {name: estimate(of_rows) for name, of_rows in values.items()}
