"""The page of `fovea eval`: figures of every target, and rows with their pictures and answers.

The same rules as for report.html: all text is escaped, scripts and outside requests are forbidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from PIL.Image import Image

from fovea.evaluation.answer import SampledAnswer
from fovea.evaluation.comparison import Comparison, Figures, Reading, Row, grouped
from fovea.evaluation.statistics import Estimate
from fovea.evaluation.tables import percent_text
from fovea.report.html import page_environment
from fovea.report.samples import png_bytes
from fovea.utils.files import write_atomically

MAX_SHOWN = 8
"""Rows of one kind of outcome; pictures are part of the page."""
RIGHT = 0.5
"""An accuracy from which on an answer counts as right in the choice of rows to show."""

ImagesOf = Callable[[Row], Sequence[Image]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A row, its pictures as PNG files, and what each target said to it."""

    row: Row
    images: tuple[bytes, ...]
    answers: tuple[tuple[str, SampledAnswer], ...]
    """Target and greedy answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Rows that ended alike."""

    title: str
    count: int
    """Of all rows; some of them are shown."""
    shown: tuple[Shown, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A table of accuracies: a line for each group of rows, a column for each target."""

    title: str
    groups: Mapping[str, Sequence[Estimate | None]]


def write_evaluation(
    path: Path, comparison: Comparison, figures: Sequence[Figures], *, title: str, images_of: ImagesOf, settings: str
) -> Path:
    """Writes the page; `settings` is shown at its end."""
    page = page_environment()
    page.filters["figure"] = percent_text
    content = page.get_template("evaluation.html.j2").render(
        title=title,
        figures=figures,
        sections=_sections(figures),
        ks=sorted({k for each in figures for k in each.pass_at}),
        outcomes=outcomes(comparison, images_of),
        config=settings,
    )
    # a data set's text may hold half a surrogate pair, which no encoding can write
    write_atomically(path, content.encode("utf-8", errors="replace"))
    return path


def _sections(figures: Sequence[Figures]) -> list[Section]:
    by = {
        "question type": [each.by_kind for each in figures],
        "image type": [each.by_image_type for each in figures],
    }
    return [
        Section(title=title, groups={name: [of.get(name) for of in groups] for name in groups[0]})
        for title, groups in by.items()
        if len(groups[0]) > 1 or (groups[0] and title == "image type")
    ]


def outcomes(comparison: Comparison, images_of: ImagesOf) -> list[Outcome]:
    """Rows that all models have right, that none has, and those on which they differ; some of each, of every kind.

    Baselines have no say in it, unless there is no model.
    """
    models = [reading for reading in comparison.readings if reading.is_model] or comparison.readings
    rights = {row.id: sum(reading.accuracy(row) >= RIGHT for reading in models) for row in comparison.rows}
    several = len(models) > 1
    titles: dict[str, Callable[[int], bool]] = {
        "Misses of all models" if several else "Misses": lambda right: right == 0,
        "Rows on which the models differ": lambda right: 0 < right < len(models),
        "Hits of all models" if several else "Hits": lambda right: right == len(models),
    }
    found = ((title, [row for row in comparison.rows if fits(rights[row.id])]) for title, fits in titles.items())
    return [
        Outcome(
            title=title,
            count=len(rows),
            shown=tuple(_shown(row, comparison.readings, images_of) for row in _of_every_kind(rows)),
        )
        for title, rows in found
        if rows
    ]


def _of_every_kind(rows: Sequence[Row]) -> list[Row]:
    """The first MAX_SHOWN rows, the kinds in turn."""
    by_kind = grouped(rows, lambda row: row.kind).values()
    in_turn = [row for turn in zip_longest(*by_kind) for row in turn if row is not None]
    return in_turn[:MAX_SHOWN]


def _shown(row: Row, readings: Sequence[Reading], images_of: ImagesOf) -> Shown:
    return Shown(
        row=row,
        images=tuple(map(png_bytes, images_of(row))),
        answers=tuple((reading.target, reading.greedy[row.id].answers[0]) for reading in readings),
    )
