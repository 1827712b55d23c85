"""Held-out figures and answers of a run as JSON for the page, from summary.json and answers/."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fovea.evaluation.json_file import HeldOutAnswer, answer_files, read_answers
from fovea.evaluation.statistics import percent, shown_once
from fovea.evaluation.tables import percent_text
from fovea.report.about import SUMMARY_FILE
from fovea.report.figure_rows import estimate_text, figures_json
from fovea.report.summary import (
    EstimateJson,
    FiguresJson,
    SummaryJson,
    estimate_from_json,
    not_scored,
    read_summary,
    stages_on_test,
)
from fovea.utils.files import json_number

MAX_ROWS = 1000
"""Answers of an evaluation that the page gets."""
MAX_CHARS = 2000
"""Of a question, a truth or an answer."""
MAX_EVALUATIONS = 200
"""Evaluations that the page offers; a run has one per dev reading."""


class HeldOutTable:
    """The final table of a run, read again when summary.json has changed."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._read_at: tuple[int, int] | None = None
        self._table: dict[str, Any] | None = None

    def table(self) -> dict[str, Any] | None:
        """`{"columns": stages, "rows": [[name, [text per stage], n], ...]}`; None before the end of the run."""
        path = self._run_dir / SUMMARY_FILE
        status = path.stat() if path.exists() else None
        read_at = status and (status.st_mtime_ns, status.st_size)
        if read_at != self._read_at:
            self._table = _table(read_summary(path)) if status else None
            self._read_at = read_at
        return self._table


def evaluations(run_dir: Path) -> list[str]:
    """Names of the evaluations with answers, the most telling first."""
    return answer_files(run_dir)[:MAX_EVALUATIONS]


def answers_json(run_dir: Path, number: int) -> dict[str, Any]:
    """The name and the rows of the evaluation with this place in `evaluations`; IndexError where there is none."""
    name = evaluations(run_dir)[number]
    return {"name": name, "rows": list(map(_answer_json, read_answers(run_dir, name, MAX_ROWS)))}


def _answer_json(answer: HeldOutAnswer) -> list[Any]:
    texts = (answer.id, answer.kind, answer.question, answer.truth, answer.text)
    numbers = (json_number(answer.reward), json_number(answer.accuracy))
    return [*map(_cut, texts), *numbers, answer.is_truncated]


def _cut(text: str) -> str:
    return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]} ... ({len(text):,} characters)"


def _table(summary: SummaryJson) -> dict[str, Any] | None:
    """Accuracies at every stage, then rewards and parts; None for a summary of versions that kept no intervals."""
    stages = stages_on_test(summary)
    if not stages:
        return None
    accuracies = list(map(_accuracies, stages.values()))
    means = list(map(figures_json, stages.values()))
    rows = [_row(f"accuracy, {name}, %", [of.get(name) for of in accuracies], _percent) for name in accuracies[-1]]
    rows += [_row(label, [of.get(name) for of in means], estimate_text) for name, label in shown_once(means).items()]
    return {"columns": list(stages), "rows": rows, "controls": _controls(summary), "not_scored": not_scored(summary)}


def _accuracies(figures: FiguresJson) -> dict[str, EstimateJson]:
    kinds = figures["by_type"] if len(figures["by_type"]) > 1 else {}
    return {**kinds, "all": figures["accuracy"]}


def _row(name: str, values: Sequence[EstimateJson | None], text: Callable[[EstimateJson | None], str]) -> list[Any]:
    final = values[-1]
    return [name, list(map(text, values)), final["n"] if final else 0]


def _percent(value: EstimateJson | None) -> str:
    return "" if value is None else percent_text(estimate_from_json(value))


def _controls(summary: SummaryJson) -> dict[str, str]:
    """Accuracies of the image ablations in percent."""
    controls = {"shuffled images": summary["shuffled_images"], "blank images": summary["blank_images"]}
    return {name: percent(value) for name, value in controls.items() if value is not None}
