"""The figures of one evaluation, each with its interval: the same in a run, its summary and `fovea eval`."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from fovea.evaluation.answer import SampledAnswer
from fovea.evaluation.statistics import Estimate, best_of, estimate, mean_estimate
from fovea.types import Evaluation, Metrics

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
    """None where no reward was kept."""
    parts: Mapping[str, Estimate]
    """Each named part of the reward, over the rows that have it."""


def figures_of(evaluation: Evaluation) -> Figures:
    """The figures of an evaluation: Wilson's interval for shares of rows, the normal one for other means."""
    return Figures(
        accuracy=estimate([value for values in evaluation.accuracies.values() for value in values]),
        by_type=_each(evaluation.accuracies),
        by_image_type=_each(evaluation.by_image_type),
        reward=mean_estimate(evaluation.rewards) if evaluation.rewards else None,
        parts={name: mean_estimate(values) for name, values in evaluation.parts.items()},
    )


def parts_of(answers: Iterable[SampledAnswer]) -> dict[str, tuple[float, ...]]:
    """Values of each named part of the reward, names in order, over the answers that have it."""
    values = defaultdict[str, list[float]](list)
    for answer in answers:
        for name, value in answer.parts.items():
            values[name].append(value)
    return {name: tuple(values[name]) for name in sorted(values)}


def shown_once(stages: Sequence[Mapping[str, T]]) -> dict[str, str]:
    """Labels of the last stage's figures by name; one that repeats an earlier one in every stage is in that label."""
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
    """Figures of a dev reading as metrics: `accuracy/dev`, `dev/reward/<part>`, their bounds `dev_low/reward`, ..."""
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
    """`dev/mean@n` and `dev/pass@n` from the accuracies of n answers to each row; none without rows."""
    if not accuracies:
        return {}
    n = len(accuracies[0])
    best = [best_of(n, of_row) for of_row in accuracies]
    return {f"dev/mean@{n}": float(np.mean(accuracies)), f"dev/pass@{n}": float(np.mean(best))}


def _each(values: Mapping[str, Sequence[float]]) -> dict[str, Estimate]:
    return {name: estimate(of_rows) for name, of_rows in values.items()}
