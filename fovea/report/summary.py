"""Summary of a finished run: accuracies before and after training, image ablations, wall time."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NotRequired, TypeAlias

from pydantic import TypeAdapter, ValidationError
from rich.table import Table
from rich.text import Text
from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12

from fovea.errors import DataError
from fovea.evaluation.statistics import Estimate, estimate, figures_of, share_estimate, shown_once
from fovea.evaluation.tables import cell, mean_cell
from fovea.types import Evaluation
from fovea.utils.bounded import read_file
from fovea.utils.files import from_json_number, json_number, write_atomically
from fovea.utils.shown_text import printable

Stage: TypeAlias = Literal["before", "warmup", "final"]
"""When the test rows are evaluated: before training, after a warm-up, after RL."""


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


class EstimateJson(TypedDict):
    """A mean over `n` rows with its 95 % interval, whose ends are null for a mean of one value."""

    mean: float
    low: float | None
    high: float | None
    n: int


class FiguresJson(TypedDict):
    """The figures of one evaluation, as `evaluation.statistics.Figures`."""

    accuracy: EstimateJson
    by_type: dict[str, EstimateJson]
    by_image_type: dict[str, EstimateJson]
    reward: EstimateJson | None
    parts: dict[str, EstimateJson]
    rows_unscored: NotRequired[int]
    """Rows left out because their grader gave no score; absent from summaries of earlier versions."""


class FiguresAlongARun(TypedDict):
    """Figures on the test rows along a run, with intervals; null where it had no such evaluation."""

    before: FiguresJson | None
    warmup: FiguresJson | None
    final: FiguresJson


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
    test: NotRequired[FiguresAlongARun]
    """Absent from summaries of earlier versions."""


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
            "test": {
                "before": _figures(self.before) if self.before else None,
                "warmup": _figures(self.warmup) if self.warmup else None,
                "final": _figures(self.final),
            },
        }

    def _by_type(self, kind: str) -> TypeAccuracy:
        values = self.final.accuracies[kind]
        warmup = self.warmup.accuracies.get(kind) if self.warmup else None
        return {"warmup": _mean(warmup) if warmup else None, "final": _mean(values), "n": len(values)}


def _figures(evaluation: Evaluation) -> FiguresJson:
    figures = figures_of(evaluation)
    return {
        "accuracy": _estimate(figures.accuracy),
        "by_type": _estimates(figures.by_type),
        "by_image_type": _estimates(figures.by_image_type),
        "reward": _estimate(figures.reward) if figures.reward else None,
        "parts": _estimates(figures.parts),
        "rows_unscored": evaluation.num_unscored,
    }


def _estimates(values: Mapping[str, Estimate]) -> dict[str, EstimateJson]:
    return {name: _estimate(value) for name, value in values.items()}


def _estimate(value: Estimate) -> EstimateJson:
    return {"mean": value.mean, "low": json_number(value.low), "high": json_number(value.high), "n": value.n}


def write_summary(path: Path, summary: Summary) -> None:
    write_atomically(path, (json.dumps(summary.to_json(), indent=2) + "\n").encode())


def read_summary(path: Path) -> SummaryJson:
    try:
        return TypeAdapter(SummaryJson).validate_json(read_file(path, within=path.parent))
    except ValidationError as error:
        first = error.errors()[0]
        raise DataError(
            f"{path}: {'.'.join(map(str, first['loc'])) or 'the file'}: {first['msg']}; delete the file, "
            "and the report leaves the summary out"
        ) from error


def accuracy_at(summary: SummaryJson, stage: Stage) -> Estimate | None:
    """The accuracy on all test rows at a stage of a run; None where it was not evaluated."""
    if "test" in summary:
        figures = summary["test"][stage]
        return estimate_from_json(figures["accuracy"]) if figures else None
    mean = summary["accuracy"][stage]
    return None if mean is None else share_estimate(mean, sum(row["n"] for row in summary["by_type"].values()))


def by_type_at(summary: SummaryJson, stage: Literal["warmup", "final"]) -> dict[str, Estimate]:
    """The accuracy on the test rows by question type at a stage of a run; empty where it was not evaluated."""
    if "test" in summary:
        figures = summary["test"][stage]
        return {kind: estimate_from_json(value) for kind, value in figures["by_type"].items()} if figures else {}
    means = {kind: (row[stage], row["n"]) for kind, row in summary["by_type"].items()}
    return {kind: share_estimate(mean, n) for kind, (mean, n) in means.items() if mean is not None}


def estimate_from_json(value: EstimateJson) -> Estimate:
    low, high = from_json_number(value["low"]), from_json_number(value["high"])
    return Estimate(mean=value["mean"], low=low, high=high, n=value["n"])


def stages_on_test(summary: SummaryJson) -> dict[str, FiguresJson]:
    """The figures on the test rows at each stage that was evaluated; empty for summaries of earlier versions."""
    if "test" not in summary:
        return {}
    before = "before warm-up" if summary["test"]["warmup"] else "before RL"
    kept = {before: summary["test"]["before"], "after warm-up": summary["test"]["warmup"]}
    return {name: figures for name, figures in kept.items() if figures} | {"after RL": summary["test"]["final"]}


def not_scored(summary: SummaryJson) -> str:
    """A sentence on the test rows that have no score; empty where all have one."""
    return _not_scored({stage: figures.get("rows_unscored", 0) for stage, figures in stages_on_test(summary).items()})


def _not_scored(rows: Mapping[str, int]) -> str:
    counts = [f"{number:,} {stage}" for stage, number in rows.items() if number]
    return f"Rows not scored and left out: {', '.join(counts)}." if counts else ""


def tables_of(summary: Summary) -> list[Table]:
    """The tables that a run ends with; those without content are left out."""
    made = (
        summary_table(summary),
        image_types_table(summary),
        rewards_table(summary),
        controls_table(summary),
    )
    return [table for table in made if table is not None]


def rewards_table(summary: Summary) -> Table | None:
    """Mean reward and its named parts over the test rows, by stage of the run; None where no reward was kept."""
    stages = {header: figures_of(evaluation) for header, evaluation in _stages(summary).items()}
    final = stages["after RL"]
    if final.reward is None:
        return None
    table = _table("Reward and its parts on held-out rows, with 95 % intervals", "")
    _add_columns(table, "mean of", [*stages, "n"])
    of_stages = [{"reward": figures.reward, **figures.parts} for figures in stages.values()]
    for name, label in shown_once(of_stages).items():
        value = of_stages[-1][name]
        assert value is not None
        table.add_row(Text(printable(label)), *(mean_cell(of.get(name)) for of in of_stages), str(value.n))
    return table


def image_types_table(summary: Summary) -> Table | None:
    """Accuracies in percent by image type; None without `evaluate.image_type_key`."""
    stages = {header: figures_of(evaluation) for header, evaluation in _stages(summary).items()}
    types = stages["after RL"].by_image_type
    if not types:
        return None
    table = _table("Accuracy by image type in %, with 95 % intervals", "")
    _add_columns(table, "image type", [*stages, "n"])
    for name, value in types.items():
        table.add_row(
            Text(printable(name)), *(cell(figures.by_image_type.get(name)) for figures in stages.values()), str(value.n)
        )
    return table


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
        "Both show the accuracy without the picture."
    )
    missing = _not_scored({name: evaluation.num_unscored for name, evaluation in columns.items()})
    table = _table("Image ablation (shuffled, blank), after RL", " ".join(filter(None, [caption, missing])))
    return _fill(table, summary.final, columns)


def _table(title: str, caption: str) -> Table:
    return Table(title=title, title_justify="left", caption=caption or None, caption_justify="left")


def _fill(table: Table, rows: Evaluation, columns: Mapping[str, Evaluation]) -> Table:
    """The table with a line for each question type of `rows` and one for all together."""
    _add_columns(table, "question type", [*columns, "n"])
    for kind in rows.accuracies:
        _add_row(table, kind, [_values(evaluation, kind) for evaluation in columns.values()])
    if set(rows.accuracies) != {"all"}:
        table.add_section()
        _add_row(table, "all", [_values(evaluation) for evaluation in columns.values()])
    return table


def _add_columns(table: Table, first: str, others: Sequence[str]) -> None:
    table.add_column(first)
    for header in others:
        table.add_column(header, justify="right")


def _stages(summary: Summary) -> dict[str, Evaluation]:
    before = "before warm-up" if summary.warmup else "before RL"
    stages = {before: summary.before, "after warm-up": summary.warmup, "after RL": summary.final}
    return {header: evaluation for header, evaluation in stages.items() if evaluation}


def _add_row(table: Table, name: str, columns: Sequence[Sequence[float]]) -> None:
    table.add_row(Text(printable(name)), *map(_cell, columns), str(len(columns[-1])))


def _cell(values: Sequence[float]) -> Text:
    if not values:
        return Text("")
    return cell(estimate(values))


def _caption(summary: Summary) -> str:
    missing = _not_scored({stage: evaluation.num_unscored for stage, evaluation in _stages(summary).items()})
    if summary.duplicates_across_splits is None:
        return missing
    frac = summary.duplicates_searched_frac
    searched = "" if frac is None or frac == 1 else f" (looked for in {100 * frac:.3g} % of its rows)"
    return f"Test images found in the training split: {summary.duplicates_across_splits}{searched}. {missing}".rstrip()


def _values(evaluation: Evaluation, kind: str | None = None) -> Sequence[float]:
    if kind is not None:
        return evaluation.accuracies.get(kind, ())
    return [value for values in evaluation.accuracies.values() for value in values]


def _accuracy(evaluation: Evaluation | None) -> float | None:
    return evaluation.accuracy if evaluation else None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(len(values), 1)
