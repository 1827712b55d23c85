"""Generator of docs/metrics.md from `fovea.metrics.names`: `python -m fovea.metrics.docs > docs/metrics.md`."""

from __future__ import annotations

import sys

from fovea.metrics.names import CHAPTERS, Chapter, Metric

HEAD = """\
# Metrics

The metrics that are logged at every step to `metrics.jsonl` and the trackers. This page is generated from
[`fovea/metrics/names.yaml`](../fovea/metrics/names.yaml) by `python -m fovea.metrics.docs > docs/metrics.md`:
change it there.

A metric that does not apply to a step is absent from its line. A value that is not finite is null. "Healthy" is what to
expect of a run that goes well, not a promise: look for changes that you did not cause.
"""


def metrics_page() -> str:
    """The Markdown text of docs/metrics.md."""
    return "\n".join([HEAD, *map(_chapter, CHAPTERS)])


def _chapter(chapter: Chapter) -> str:
    head = ["| name | unit | what it is | healthy |", "|---|---|---|---|"]
    return "\n".join([f"## {chapter.title}", "", *head, *map(_row, chapter.metrics), ""])


def _row(metric: Metric) -> str:
    cells = (f"`{metric.name}`", metric.unit, metric.meaning, metric.healthy)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


if __name__ == "__main__":
    sys.stdout.write(metrics_page())
