"""Findings: known causes why a run collapses or does not improve, read from its metrics; rules are in findings.yaml.

Conditions use the newest values, so that a run that has recovered has no finding. Axes: `N` steps with a value.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import yaml
from numpy.typing import NDArray
from pydantic import ConfigDict, TypeAdapter

from fovea.types import Metrics

Column: TypeAlias = tuple[Sequence[float], Sequence[float]]
"""Steps [N] and values [N] of a metric."""
STAGE = "curriculum/stage"
"""Each stage scores differently, so values of earlier stages are not compared with those of the current one."""
MAX_SHOWN, MAX_VALUE_CHARS = 10**15, 40
"""Largest number and longest text that a finding shows as the value of a setting."""
BASELINE_STEPS = 2
"""Number of first values of a metric with which `growth` compares the newest ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """Bounds on a statistic of the newest values of a metric."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    metric: str
    of: Literal["mean", "spread", "growth", "of_best", "best"] = "mean"
    """The statistic: mean; largest minus smallest (spread); mean relative to that of the run's first values (growth);
    mean relative to the best mean of as many consecutive values (of_best); that best mean (best)."""
    at_least: float = -np.inf
    at_most: float = np.inf
    or_absent: bool = False
    """The condition also holds for a run without this metric."""

    def holds(self, columns: Mapping[str, NDArray[np.float64]], window: int) -> bool:
        values_N = columns.get(self.metric, np.empty(0))
        if not len(values_N):
            return self.or_absent
        return len(values_N) >= window and self.at_least <= self._figure(values_N, window) <= self.at_most

    def _figure(self, values_N: NDArray[np.float64], window: int) -> float:
        newest_N = values_N[-window:]
        mean = float(newest_N.mean())
        match self.of:
            case "mean":
                return mean
            case "spread":
                return float(np.ptp(newest_N))
            case "growth":
                return mean / max(float(values_N[:BASELINE_STEPS].mean()), 1e-9)
        best = float(np.convolve(values_N, np.full(window, 1 / window), "valid").max())
        return best if self.of == "best" else mean / max(best, 1e-9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A cause, the conditions that reveal it, and what to do about it."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    cause: str
    conditions: tuple[Condition, ...]
    """The metric of the first condition is shown as evidence."""
    window: int
    """Number of newest values of each metric that the conditions use."""
    settings: tuple[str, ...]
    advice: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A cause that the metrics of a run show."""

    cause: str
    metric: str
    evidence: str
    """Value of the metric, and the steps of that value."""
    advice: str
    settings: str

    @property
    def text(self) -> str:
        return f"{self.cause}: {self.evidence}. {self.advice} ({self.settings})"


def _read(file: Path) -> tuple[Rule, ...]:
    """Read the rules in a file; ValidationError for a rule with an unknown or missing field."""
    return TypeAdapter(tuple[Rule, ...]).validate_python(yaml.safe_load(file.read_text(encoding="utf-8")))


RULES = _read(Path(__file__).with_suffix(".yaml"))
METRICS = frozenset({STAGE, *(condition.metric for rule in RULES for condition in rule.conditions)})


def find(columns: Mapping[str, Column], settings: Mapping[str, Any]) -> list[Finding]:
    """The findings about a run, from its metrics so far and its settings as YAML values."""
    stages = np.asarray(columns[STAGE][1] if STAGE in columns else ())
    changes = np.flatnonzero(np.diff(stages))
    start = columns[STAGE][0][int(changes[-1]) + 1] if len(changes) else -np.inf
    kept = {name: _since(start, columns[name]) for name in METRICS & columns.keys()}
    values = {name: values_N for name, (_, values_N) in kept.items()}
    return [
        _finding(rule, *kept[rule.conditions[0].metric], settings)
        for rule in RULES
        if all(condition.holds(values, rule.window) for condition in rule.conditions)
    ]


def _since(start: float, column: Column) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    steps_N, values_N = np.asarray(column[0], np.float64), np.asarray(column[1], np.float64)
    kept = np.isfinite(values_N) & (steps_N >= start)
    return steps_N[kept], values_N[kept]


def _finding(
    rule: Rule, steps_N: NDArray[np.float64], values_N: NDArray[np.float64], settings: Mapping[str, Any]
) -> Finding:
    metric, newest = rule.conditions[0].metric, slice(-rule.window, None)
    first, last = int(steps_N[newest][0]), int(steps_N[-1])
    when = f"mean of steps {first:,} to {last:,}" if first < last else f"step {last:,}"
    return Finding(
        cause=rule.cause,
        metric=metric,
        evidence=f"{metric} is {values_N[newest].mean():.3g} ({when})",
        advice=rule.advice,
        settings=", ".join(map("=".join, _values_of(rule.settings, settings))),
    )


def _values_of(keys: Sequence[str], settings: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Each key, with its value if the run has a single value for it."""
    for key in keys:
        value: Any = settings
        for name in key.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        # in a stranger's run it may be anything, such as a number too large for Python to print
        is_shown = isinstance(value, bool | float | str) or (isinstance(value, int) and abs(value) < MAX_SHOWN)
        yield (key, str(value).lower()[:MAX_VALUE_CHARS]) if is_shown else (key,)


class FindingsWatch:
    """Keeps the metrics of a run's steps, and the causes that this process has already found in them."""

    def __init__(self, earlier: Iterable[Metrics] = ()) -> None:
        """`earlier`: the rows of metrics.jsonl, if the run is resumed."""
        self._columns: dict[str, tuple[list[float], list[float]]] = {}
        self._known: set[str] = set()
        for metrics in earlier:
            self._add(metrics["step"], metrics)

    def new(self, step: int, metrics: Metrics, settings: Mapping[str, Any]) -> list[Finding]:
        """Add a step; returns the findings whose causes were not found before."""
        self._add(step, metrics)
        found = [finding for finding in find(self._columns, settings) if finding.cause not in self._known]
        self._known |= {finding.cause for finding in found}
        return found

    def _add(self, step: float, metrics: Metrics) -> None:
        for name in METRICS & metrics.keys():
            steps, values = self._columns.setdefault(name, ([], []))
            steps.append(step)
            values.append(metrics[name])
