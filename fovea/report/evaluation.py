"""The page of `fovea eval --html`: the same page as for runs, with evaluated targets in place of runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from typing import Any

from PIL.Image import Image

from fovea.config.recipes import read_yaml
from fovea.evaluation.comparison import EvalResults, TargetAnswers, TargetMetrics, grouped
from fovea.evaluation.records import AnsweredRow, TaskRow
from fovea.report.about_run import settings_pairs
from fovea.report.export import PageData, write_page
from fovea.report.figures import RunSummary, target_summary
from fovea.report.held_out import MAX_PICTURED, MAX_ROWS, row_json, thumbnails
from fovea.report.images import name_of

RIGHT = 0.5
"""Least accuracy at which an answer counts as correct when rows are chosen for display."""
EVALUATION = "greedy"

ImagesOf = Callable[[TaskRow], Sequence[Image]]


def write_evaluation(
    path: Path,
    results: EvalResults,
    metrics: Sequence[TargetMetrics],
    *,
    title: str,
    images_of: ImagesOf,
    settings: str,
) -> Path:
    """Write the page to `path` and return `path`; `settings` is YAML text."""
    data = PageData()
    add_answers(data, 0, EVALUATION, results, images_of)
    first = results.targets[0].name
    summaries = [target_summary(figures, first) for figures in metrics]
    return write_targets(path, data, [target_facts(each, title) for each in results.targets], summaries, settings)


def add_answers(data: PageData, number: int, evaluation: str, results: EvalResults, images_of: ImagesOf) -> None:
    """Add the rows of the `number`-th evaluation, with the answers of every target."""
    rows = of_every_outcome(results)[:MAX_ROWS]
    pictures = {row.id: thumbnails(images_of(row)) for row in rows[:MAX_PICTURED]}
    names = {row: tuple(map(name_of, of_row)) for row, of_row in pictures.items()}
    # all targets have the same rows: the pictures are stored once, under the first target
    data.images.update({f"0/{name_of(png)}": png for of_row in pictures.values() for png in of_row})
    for place, target in enumerate(results.targets):
        firsts = [AnsweredRow(**asdict(row), answers=target.greedy[row.id].answers[:1]) for row in rows]
        found = [row_json(row, names.get(row.id, ())) for row in firsts]
        data.add(f"answers/{place}/{number}", {"name": evaluation, "rows": found})


def write_targets(
    path: Path, data: PageData, facts: Sequence[Mapping[str, Any]], summaries: Sequence[RunSummary], settings: str
) -> Path:
    """Write the page of targets to `path` and return `path`; `data` already holds their answers."""
    about = {"settings": settings_pairs(read_yaml(settings, "settings")), "console": ""}
    for place, summary in enumerate(summaries):
        data.add(f"summary/{place}/0", asdict(summary))
        data.add(f"about/{place}/0", about)
    data.add("runs", list(facts))
    write_page(path, data)
    return path


def of_every_outcome(results: EvalResults) -> list[TaskRow]:
    """All rows, alternating between kinds and between rows that no model, some models or all models got right.

    The order matters because only the first rows have pictures. Baselines count only if no target is a model.
    """
    models = [target for target in results.targets if target.is_model] or results.targets

    def outcome(row: TaskRow) -> str:
        rights = sum(target.accuracy(row) >= RIGHT for target in models)
        return f"{(rights > 0) + (rights == len(models))} {row.kind}"

    groups = grouped(results.rows, outcome).values()
    return [row for turn in zip_longest(*groups) for row in turn if row is not None]


def target_facts(target: TargetAnswers, title: str, evaluations: Sequence[str] = (EVALUATION,)) -> Mapping[str, Any]:
    """The facts about a target, in the form of a run's facts (`ViewedRun.facts`)."""
    return {
        "name": target.name,
        "title": title,
        "about": {"rows": title},
        "max_steps": None,
        "folder": "",
        "step": 0,
        "share_read": 1.0,
        "finished": True,
        "seconds_since_step": None,
        "metrics": [],
        "repeats": [],
        "rounding": [],
        "entries": 0,
        "newest_entry": None,
        "console_bytes": 0,
        "hints": [],
        "findings": [],
        "evaluations": list(evaluations),
        "left_out": "",
    }
