"""The HTML page of `fovea eval --html`: metrics of every target, and example rows with images and answers.

As in report.html, all text is escaped, and scripts and outside requests are forbidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from PIL.Image import Image

from fovea.evaluation.answer import SampledAnswer
from fovea.evaluation.comparison import EvalResults, EvalRow, TargetAnswers, TargetMetrics, grouped
from fovea.evaluation.statistics import Estimate
from fovea.evaluation.tables import mean_text, percent_text
from fovea.report.html import page_environment
from fovea.report.images import png_bytes
from fovea.utils.files import write_atomically

MAX_SHOWN = 8
"""Rows shown for each outcome; a bound, because images are embedded in the page."""
RIGHT = 0.5
"""Accuracy from which an answer counts as correct in the choice of rows to show."""

ImagesOf = Callable[[EvalRow], Sequence[Image]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownRow:
    """An example row with its images (PNG files) and the answer of each target."""

    row: EvalRow
    images: tuple[bytes, ...]
    answers: tuple[tuple[str, SampledAnswer], ...]
    """Pairs of target and greedy answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The rows that all models, some or none answered correctly."""

    title: str
    count: int
    """Number of such rows; a few of them are shown."""
    shown: tuple[ShownRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyTable:
    """A table of accuracies with one line per group of rows and one column per target."""

    title: str
    groups: Mapping[str, Sequence[Estimate | None]]


def write_evaluation(
    path: Path,
    results: EvalResults,
    metrics: Sequence[TargetMetrics],
    *,
    title: str,
    images_of: ImagesOf,
    settings: str,
) -> Path:
    """Write the page to `path` and return that; `settings` is the YAML text at its end."""
    page = page_environment()
    page.filters |= {"with_interval": percent_text, "mean_with_interval": mean_text}
    content = page.get_template("evaluation.html.j2").render(
        title=title,
        metrics=metrics,
        tables=_tables(metrics),
        part_names=sorted({name for each in metrics for name in each.parts}),
        ks=sorted({k for each in metrics for k in each.pass_at}),
        outcomes=outcomes(results, images_of),
        config=settings,
    )
    # text of a data set may hold lone surrogates, which UTF-8 cannot encode
    write_atomically(path, content.encode("utf-8", errors="replace"))
    return path


def _tables(metrics: Sequence[TargetMetrics]) -> list[AccuracyTable]:
    by = {
        "question type": [each.by_kind for each in metrics],
        "image type": [each.by_image_type for each in metrics],
    }
    return [
        AccuracyTable(title=title, groups={name: [of.get(name) for of in groups] for name in groups[0]})
        for title, groups in by.items()
        if len(groups[0]) > 1 or (groups[0] and title == "image type")
    ]


def outcomes(results: EvalResults, images_of: ImagesOf) -> list[Outcome]:
    """Rows that no model answered correctly, that some did and that all did, with examples of every kind.

    Baselines do not count, unless there is no model.
    """
    models = [target for target in results.targets if target.is_model] or results.targets
    rights = {row.id: sum(target.accuracy(row) >= RIGHT for target in models) for row in results.rows}
    several = len(models) > 1
    titles: dict[str, Callable[[int], bool]] = {
        "Misses of all models" if several else "Misses": lambda right: right == 0,
        "Rows on which the models differ": lambda right: 0 < right < len(models),
        "Hits of all models" if several else "Hits": lambda right: right == len(models),
    }
    found = ((title, [row for row in results.rows if fits(rights[row.id])]) for title, fits in titles.items())
    return [
        Outcome(
            title=title,
            count=len(rows),
            shown=tuple(_shown(row, results.targets, images_of) for row in _of_every_kind(rows)),
        )
        for title, rows in found
        if rows
    ]


def _of_every_kind(rows: Sequence[EvalRow]) -> list[EvalRow]:
    """Up to MAX_SHOWN rows, taken round-robin over the kinds."""
    by_kind = grouped(rows, lambda row: row.kind).values()
    in_turn = [row for turn in zip_longest(*by_kind) for row in turn if row is not None]
    return in_turn[:MAX_SHOWN]


def _shown(row: EvalRow, targets: Sequence[TargetAnswers], images_of: ImagesOf) -> ShownRow:
    return ShownRow(
        row=row,
        images=tuple(map(png_bytes, images_of(row))),
        answers=tuple((target.name, target.greedy[row.id].answers[0]) for target in targets),
    )
