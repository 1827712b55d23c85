"""The metrics of a run as columns, and curves of few enough points to draw.

Axes: `N` steps with a value, `B` points of a curve.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fovea.metrics.jsonl import METRICS_FILE, parse_metrics
from fovea.view.tail import Tail

MAX_POINTS = 400
"""Of a curve: about one per two pixels of a chart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A metric by step: means of consecutive steps, with the least and the greatest value among them."""

    steps_B: NDArray[np.float64]
    means_B: NDArray[np.float64]
    lows_B: NDArray[np.float64]
    highs_B: NDArray[np.float64]


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
