"""Summary of a finished run: accuracies before and after training, image ablations, wall time."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NotRequired

from pydantic import TypeAdapter, ValidationError
from rich.table import Table
from rich.text import Text
from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12

from fovea.errors import DataError
from fovea.evaluation.statistics import format_interval, wilson_interval
from fovea.types import Evaluation
from fovea.utils.files import write_atomically

SUMMARY_FILE = "summary.json"


class TrainingAccuracy(TypedDict):
    """Accuracies along a run; null where it had no such evaluation."""

    before: float | None
    warmup: float | None
    final: float


class TypeAccuracy(TypedDict):
    """Accuracies of one question type over `n` rows."""

    warmup: float | None
    final: float
    n: int


class TrainingSeconds(TypedDict):
    """Wall time of warm-up, RL and the whole run."""

    warmup: float
    rl: float
    total: float


class SummaryJson(TypedDict):
    """The content of summary.json. Accuracies are in 0..1, null where that evaluation was not run."""

    accuracy: TrainingAccuracy
    by_type: dict[str, TypeAccuracy]
    shuffled_images: float | None
    blank_images: float | None
    duplicates_across_splits: int | None
    duplicates_searched_frac: NotRequired[float | None]
    seconds: TrainingSeconds
    steps: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Final evaluations and times of a run. Evaluations decode greedily, on the same held-out rows."""

    before: Evaluation | None
    """The initial model."""
    warmup: Evaluation | None
    """After the supervised warm-up; None without one."""
    final: Evaluation
    """After RL."""
    shuffled_images: Evaluation | None
    """After RL, with every question's images replaced by another question's."""
    blank_images: Evaluation | None
    """After RL, with every question's images replaced by blank ones."""
    duplicates_across_splits: int | None
    """Number of test rows with an image that the training split also has; None where not counted."""
    duplicates_searched_frac: float | None = None
    """Share of the training rows in which these were looked for; None where not counted."""
    warmup_seconds: float
    rl_seconds: float
    total_seconds: float
    steps: int
    seed: int

    def to_json(self) -> SummaryJson:
        return {
            "accuracy": {
                "before": _accuracy(self.before),
                "warmup": _accuracy(self.warmup),
                "final": self.final.accuracy,
            },
            "by_type": {kind: self._by_type(kind) for kind in self.final.accuracies},
            "shuffled_images": _accuracy(self.shuffled_images),
            "blank_images": _accuracy(self.blank_images),
            "duplicates_across_splits": self.duplicates_across_splits,
            "duplicates_searched_frac": self.duplicates_searched_frac,
            "seconds": {"warmup": self.warmup_seconds, "rl": self.rl_seconds, "total": self.total_seconds},
            "steps": self.steps,
            "seed": self.seed,
        }

    def _by_type(self, kind: str) -> TypeAccuracy:
        values = self.final.accuracies[kind]
        warmup = self.warmup.accuracies.get(kind) if self.warmup else None
        return {"warmup": _mean(warmup) if warmup else None, "final": _mean(values), "n": len(values)}


def write_summary(path: Path, summary: Summary) -> None:
    write_atomically(path, (json.dumps(summary.to_json(), indent=2) + "\n").encode())


def read_summary(path: Path) -> SummaryJson:
    try:
        return TypeAdapter(SummaryJson).validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        raise DataError(
            f"{path}: {'.'.join(map(str, first['loc'])) or 'the file'}: {first['msg']}; delete the file, "
            "and the report leaves the summary out"
        ) from error


def summary_table(summary: Summary) -> Table:
    """Accuracies in percent with 95 % intervals, by question type: before training, after warm-up, after RL."""
    table = _table("Accuracy on held-out images in %, with 95 % intervals", _caption(summary))
    return _fill(table, summary.final, _stages(summary))


def controls_table(summary: Summary) -> Table | None:
    """Image ablation of the trained model, by question type; None where no control was run."""
    controls = {"shuffled images": summary.shuffled_images, "blank images": summary.blank_images}
    columns = {"true images": summary.final} | {name: control for name, control in controls.items() if control}
    if len(columns) == 1:
        return None
    caption = (
        "Shuffled: each question with another question's images; blank: with grey ones. "
        "Both show the accuracy that the text alone gives."
    )
    return _fill(_table("Image ablation (shuffled, blank), after RL", caption), summary.final, columns)


def _table(title: str, caption: str) -> Table:
    return Table(title=title, title_justify="left", caption=caption or None, caption_justify="left")


def _fill(table: Table, rows: Evaluation, columns: Mapping[str, Evaluation]) -> Table:
    """The table with a line for each question type of `rows` and one for all together."""
    table.add_column("question type")
    for header in (*columns, "n"):
        table.add_column(header, justify="right")
    for kind in rows.accuracies:
        _add_row(table, kind, [_values(evaluation, kind) for evaluation in columns.values()])
    if set(rows.accuracies) != {"all"}:
        table.add_section()
        _add_row(table, "all", [_values(evaluation) for evaluation in columns.values()])
    return table


def _stages(summary: Summary) -> dict[str, Evaluation]:
    before = "before warm-up" if summary.warmup else "before RL"
    stages = {before: summary.before, "after warm-up": summary.warmup, "after RL": summary.final}
    return {header: evaluation for header, evaluation in stages.items() if evaluation}


def _add_row(table: Table, name: str, columns: Sequence[Sequence[float]]) -> None:
    table.add_row(Text(name), *map(_cell, columns), str(len(columns[-1])))


def _cell(values: Sequence[float]) -> Text:
    if not values:
        return Text("")
    interval = format_interval(wilson_interval(_mean(values), len(values)))
    return Text.assemble((f"{100 * _mean(values):.1f}", "bold"), (f" {interval}", "dim"))


def _caption(summary: Summary) -> str:
    if summary.duplicates_across_splits is None:
        return ""
    frac = summary.duplicates_searched_frac
    searched = "" if frac is None or frac == 1 else f" (looked for in {100 * frac:.3g} % of its rows)"
    return f"Test images found in the training split: {summary.duplicates_across_splits}{searched}."


def _values(evaluation: Evaluation, kind: str | None = None) -> Sequence[float]:
    if kind is not None:
        return evaluation.accuracies.get(kind, ())
    return [value for values in evaluation.accuracies.values() for value in values]


def _accuracy(evaluation: Evaluation | None) -> float | None:
    return evaluation.accuracy if evaluation else None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(len(values), 1)
