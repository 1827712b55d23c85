"""Definitions of all logged metrics (names.yaml): name, unit, meaning, and the range in a healthy run.

`python -m fovea.metrics.names` prints them as a page of the documentation.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import yaml


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric, or a family of them: a word in angle brackets stands for any text (`accuracy/dev/<kind>`)."""

    name: str
    unit: str
    meaning: str
    healthy: str

    @property
    def pattern(self) -> re.Pattern[str]:
        pieces = re.split(r"<[a-z_]+>", self.name)
        return re.compile(".+".join(map(re.escape, pieces)))


def _read(file: Path) -> dict[str, tuple[Metric, ...]]:
    """Read the metrics in a file, by chapter title; TypeError for a metric with an unknown or missing field."""
    chapters = yaml.safe_load(file.read_text(encoding="utf-8"))
    return {chapter["title"]: tuple(Metric(**row) for row in chapter["metrics"]) for chapter in chapters}


CHAPTERS = _read(Path(__file__).with_suffix(".yaml"))
METRICS = tuple(metric for metrics in CHAPTERS.values() for metric in metrics)


def definition_of(key: str) -> Metric | None:
    """The definition of a key of metrics.jsonl; an exact name takes precedence over a matching family."""
    exact = (metric for metric in METRICS if metric.name == key)
    family = (metric for metric in METRICS if metric.pattern.fullmatch(key))
    return next(exact, None) or next(family, None)


def undefined(keys: Iterable[str]) -> list[str]:
    """The keys without a definition, sorted; `step` does not need one."""
    return sorted({key for key in keys if key != "step" and definition_of(key) is None})


HEAD = """\
# Metrics

The metrics that are logged at every step to `metrics.jsonl` and the trackers. This page is generated from
`fovea/metrics/names.yaml`; `python -m fovea.metrics.names` prints it.

A metric that does not apply to a step is absent from its line. A value that is not finite is null. "Healthy" is what to
expect of a run that goes well, not a promise: look for changes that you did not cause.
"""


def metrics_page() -> str:
    """The page of all metrics, as Markdown."""
    lines = [HEAD]
    for title, metrics in CHAPTERS.items():
        head = ["| name | unit | what it is | healthy |", "|---|---|---|---|"]
        lines += [f"## {title}", "", *head, *map(_row, metrics), ""]
    return "\n".join(lines)


def _row(metric: Metric) -> str:
    cells = (f"`{metric.name}`", metric.unit, metric.meaning, metric.healthy)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


ROUNDING_NATS = 1e-9
"""If the KL between engine and trainer stays below this, it is float32 rounding and not worth a curve."""


def is_rounding(name: str, values: Iterable[float]) -> bool:
    """True if all values of a metric are rounding errors, which are not worth a curve."""
    # non-finite values are not rounding errors: `<` is False for NaN
    return name == "mismatch/kl" and all(abs(value) < ROUNDING_NATS for value in values)


if __name__ == "__main__":
    sys.stdout.write(metrics_page())
