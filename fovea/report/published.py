"""A published result next to the run that reproduces it: tables and notes of the page, from published.json."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from pydantic import TypeAdapter
from typing_extensions import TypedDict  # pydantic needs this TypedDict before Python 3.12

from fovea.evaluation.statistics import percent, percent_text
from fovea.report.figures import FigureRow, FigureTable, RunSummary
from fovea.report.summary import Stage, SummaryJson, accuracy_at
from fovea_gym.benchmarks.estimates import Estimate
from fovea_gym.utils.bounded import read_file
from fovea_gym.utils.files import write_atomically
from fovea_gym.utils.stored import from_json, to_json

PUBLISHED_FILE = "published.json"


class DifferingSetting(TypedDict):
    """A setting that differs between authors, recipe and run; each value is text, empty if it is not set."""

    theirs: str
    recipe: str
    run: str
    why: str


class PublishedJson(TypedDict):
    """The content of published.json. Accuracies are in 0..1, null if none is published."""

    title: str
    source: str
    where: str
    """The authors' file that contains the figure."""
    rows: str
    same_rows: bool
    bench: str
    """Name of the benchmark that this figure, or another published one, was measured on; empty if there is none."""
    before: float | None
    after: float | None
    curve: str
    settings: list[DifferingSetting]


_PUBLISHED = TypeAdapter(PublishedJson)


def write_published(run_dir: Path, published: PublishedJson) -> None:
    write_atomically(run_dir / PUBLISHED_FILE, (to_json(_PUBLISHED, published, indent=2) + "\n").encode())


def with_published(shown: RunSummary, summary: SummaryJson | None, run_dir: Path) -> RunSummary:
    """Add the published result to a run's summary, if the run folder has one; DataError for a damaged file."""
    path = run_dir / PUBLISHED_FILE
    try:
        content = read_file(path, within=run_dir)
    except FileNotFoundError:
        return shown
    fix = "delete the file, and the page leaves it out"
    published = from_json(_PUBLISHED, content, f"{path} is not a published result", fix)
    ours: dict[Stage, Estimate | None] = {
        stage: accuracy_at(summary, stage) if summary else None for stage in ("before", "final")
    }
    tables = (_figures(published, ours), *shown.tables, _settings(published))
    return replace(shown, tables=tables, notes=(*_notes(published, ours["final"], run_dir), *shown.notes))


def _figures(published: PublishedJson, ours: Mapping[Stage, Estimate | None]) -> FigureTable:
    before = ("before training", published["before"], ours["before"])
    after = ("after training", published["after"], ours["final"])
    rows = (
        FigureRow(name=name, texts=("" if theirs is None else percent(theirs), percent_text(mine)))
        for name, theirs, mine in (before, after)
        if (theirs, mine) != (None, None)
    )
    columns = ("published", "this run, with its 95 % interval")
    return FigureTable(title="Published result: accuracy in %", first="", columns=columns, rows=tuple(rows))


def _settings(published: PublishedJson) -> FigureTable:
    rows = (
        FigureRow(name=each["theirs"], texts=(each["recipe"], each["run"], each["why"]))
        for each in published["settings"]
    )
    columns = ("recipe", "this run", "why")
    return FigureTable(title="Settings that differ", first="authors", columns=columns, rows=tuple(rows))


def _notes(published: PublishedJson, ours: Estimate | None, run_dir: Path) -> tuple[str, ...]:
    named = {"Settings": "source", "Figure": "where", "Curve": "curve"}
    sources = [f"{label}: {published[key]}." for label, key in named.items()]  # type: ignore[literal-required]
    verdict, bench = _verdict(published, ours), published["bench"]
    if bench:
        verdict += f" On {bench}: `{shlex.join(['fovea', 'eval', str(run_dir), f'bench={bench}'])}`."
    return " ".join([f"{published['title']}.", *sources]), verdict


def _verdict(published: PublishedJson, ours: Estimate | None) -> str:
    """A sentence that compares the published figure with this run's interval."""
    theirs = published["after"]
    if theirs is None:
        return "There is no published figure to compare with."
    if not published["same_rows"]:
        return f"The published figure is on other rows ({published['rows']}): the two cannot be compared."
    if ours is None:
        return "This run has not been evaluated on its test rows."
    lies = "inside" if ours.low <= theirs <= ours.high else "outside"
    return f"The published figure ({published['rows']}) is {lies} this run's 95 % interval, over rows of one seed."
