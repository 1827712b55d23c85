"""The metrics of a run as columns, and curves of few enough points to draw.

Axes: `N` steps with a value, `B` points of a curve.
"""

from __future__ import annotations

import re
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fovea.metrics.jsonl import METRICS_FILE, parse_metrics
from fovea.view.tail import Tail

MAX_POINTS = 400
"""Of a curve: about one per two pixels of a chart."""
MAX_PARTS = 32
"""Parts of the reward that are compared with each other; an overview shows fewer."""
Total: TypeAlias = Literal["seconds", "tokens"]
"""Axes beside the step: wall time of the steps, and completion tokens."""
_PART = re.compile(r"reward/[^/]+", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A metric by step: means of consecutive steps, with the least and the greatest value among them."""

    steps_B: NDArray[np.float64]
    means_B: NDArray[np.float64]
    lows_B: NDArray[np.float64]
    highs_B: NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """A sum over a run's steps, by step."""

    steps_B: NDArray[np.float64]
    totals_B: NDArray[np.float64]


@dataclass(slots=True)
class _Column:
    """The values of one metric; a step without the metric has no entry."""

    steps: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))


class Curves:
    """The columns of metrics.jsonl, which grow with the file."""

    def __init__(self, run_dir: Path) -> None:
        self._tail = Tail(run_dir / METRICS_FILE, run_dir)
        self._columns: dict[str, _Column] = {}
        self.last_step = 0

    def refresh(self) -> None:
        """Read what the run has appended; DataError for a line that holds no metrics."""
        appended = self._tail.read()
        if appended.begun_anew:
            self._columns, self.last_step = {}, 0
        for line in appended.lines:
            row = parse_metrics(line, where=f"a line of {self._tail.path}")
            step = row.pop("step")
            self.last_step = int(step)
            for name, value in row.items():
                column = self._columns.setdefault(name, _Column())
                column.steps.append(step)
                column.values.append(value)

    def totals(self, of: Total) -> Totals:
        """The seconds or the completion tokens of all steps up to each one; no points where they are not known."""
        seconds, rates = (self._columns.get(name, _Column()) for name in ("seconds/step", "tokens_per_second"))
        steps_N, added_N = np.array(seconds.steps), np.array(seconds.values)
        if of == "tokens":
            rate_of = dict(zip(rates.steps, rates.values, strict=True))
            added_N = added_N * np.array([rate_of.get(step, 0.0) for step in seconds.steps])
        if not added_N.any():
            return Totals(steps_B=np.empty(0), totals_B=np.empty(0))
        shown_B = np.unique(np.linspace(0, len(steps_N) - 1, MAX_POINTS).astype(np.int64))
        added_N = np.where(np.isfinite(added_N), added_N, 0)
        return Totals(steps_B=steps_N[shown_B], totals_B=np.cumsum(added_N)[shown_B])

    def repeats(self) -> list[str]:
        """Parts of the reward whose values are those of the reward or of an earlier part in every step."""
        parts = [name for name in self._columns if _PART.fullmatch(name)]
        seen, found = set[tuple[bytes, bytes]](), list[str]()
        for name in ("reward", *parts[:MAX_PARTS]):
            column = self._columns.get(name, _Column())
            key = (column.steps.tobytes(), column.values.tobytes())
            if key in seen and name in parts:
                found.append(name)
            seen.add(key)
        return found

    @property
    def names(self) -> list[str]:
        """Names of all metrics, in the order in which they first occurred."""
        return list(self._columns)

    def curve(self, name: str) -> Curve:
        """The curve of a metric; KeyError for a name that is none."""
        column = self._columns[name]
        return downsampled(np.array(column.steps), np.array(column.values), MAX_POINTS)


def downsampled(steps_N: NDArray[np.float64], values_N: NDArray[np.float64], max_points: int) -> Curve:
    """The curve in at most `max_points` points, each of equally many steps; values that are not finite are left out."""
    finite = np.isfinite(values_N)
    steps_N, values_N = steps_N[finite], values_N[finite]
    if len(values_N) <= max_points:
        return Curve(steps_B=steps_N, means_B=values_N, lows_B=values_N, highs_B=values_N)
    starts_B = np.linspace(0, len(values_N), max_points, endpoint=False).astype(np.int64)
    counts_B = np.diff(np.append(starts_B, len(values_N)))
    return Curve(
        steps_B=np.add.reduceat(steps_N, starts_B) / counts_B,
        means_B=np.add.reduceat(values_N, starts_B) / counts_B,
        lows_B=np.minimum.reduceat(values_N, starts_B),
        highs_B=np.maximum.reduceat(values_N, starts_B),
    )
