"""The summary of a finished run: accuracies before and after training, image ablations, wall time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from pydantic import TypeAdapter
from typing_extensions import TypedDict  # pydantic needs this TypedDict before Python 3.12

from fovea.evaluation.statistics import Figures, figures_of
from fovea.types import Evaluation
from fovea_gym.benchmarks.estimates import Estimate
from fovea_gym.utils.bounded import read_file
from fovea_gym.utils.files import write_atomically
from fovea_gym.utils.stored import from_json, to_json

Stage: TypeAlias = Literal["before", "warmup", "final"]
"""Stage at which the test rows are evaluated: before training, after a warm-up, or after RL."""
STAGES: tuple[Stage, ...] = ("before", "warmup", "final")


class TrainingAccuracy(TypedDict):
    """Accuracies at the stages of a run; null for a stage that was not evaluated."""

    before: float | None
    warmup: float | None
    final: float


class TypeAccuracy(TypedDict):
    """Accuracies on one question type, over `n` rows."""

    warmup: float | None
    final: float
    n: int


class TrainingSeconds(TypedDict):
    """Wall time of warm-up, RL and the whole run."""

    warmup: float
    rl: float
    total: float


class FiguresAlongARun(TypedDict):
    """Figures on the test rows at the stages of a run, with intervals; null for a stage that was not evaluated."""

    before: Figures | None
    warmup: Figures | None
    final: Figures


class SummaryJson(TypedDict):
    """The content of summary.json. Accuracies are in 0..1, null if that evaluation was not run."""

    accuracy: TrainingAccuracy
    by_type: dict[str, TypeAccuracy]
    shuffled_images: float | None
    blank_images: float | None
    same_kinds: float | None
    """The final accuracy on the question types that were asked with shuffled images."""
    duplicates_across_splits: int | None
    duplicates_searched_frac: float | None
    seconds: TrainingSeconds
    steps: int
    seed: int
    test: FiguresAlongARun


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Evaluations and wall times of a finished run. All evaluations decode greedily on the same held-out rows."""

    before: Evaluation | None
    """Evaluation of the initial model."""
    warmup: Evaluation | None
    """Evaluation after the supervised warm-up; None without a warm-up."""
    final: Evaluation
    """Evaluation after RL."""
    shuffled_images: Evaluation | None
    """Evaluation after RL, with every question's images replaced by another question's."""
    blank_images: Evaluation | None
    """Evaluation after RL, with every question's images replaced by blank ones."""
    duplicates_across_splits: int | None
    """Number of test rows with an image that the training split also has; None if not counted."""
    duplicates_searched_frac: float | None = None
    """Share of the training rows that were searched for duplicates; None if they were not counted."""
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
            "same_kinds": self._same_kinds(),
            "duplicates_across_splits": self.duplicates_across_splits,
            "duplicates_searched_frac": self.duplicates_searched_frac,
            "seconds": {"warmup": self.warmup_seconds, "rl": self.rl_seconds, "total": self.total_seconds},
            "steps": self.steps,
            "seed": self.seed,
            "test": {
                "before": figures_of(self.before) if self.before else None,
                "warmup": figures_of(self.warmup) if self.warmup else None,
                "final": figures_of(self.final),
            },
        }

    def _same_kinds(self) -> float | None:
        if self.shuffled_images is None:
            return None
        kinds = self.shuffled_images.accuracies.keys() & self.final.accuracies.keys()
        return _mean([value for kind in sorted(kinds) for value in self.final.accuracies[kind]])

    def _by_type(self, kind: str) -> TypeAccuracy:
        values = self.final.accuracies[kind]
        warmup = self.warmup.accuracies.get(kind) if self.warmup else None
        return {"warmup": _mean(warmup) if warmup else None, "final": _mean(values), "n": len(values)}


_SUMMARY = TypeAdapter(SummaryJson)


def write_summary(path: Path, summary: Summary) -> None:
    write_atomically(path, (to_json(_SUMMARY, summary.to_json(), indent=2) + "\n").encode())


def read_summary(path: Path) -> SummaryJson:
    content = read_file(path, within=path.parent)
    return from_json(_SUMMARY, content, f"{path} is not a summary", "delete the file, and the report leaves it out")


def accuracy_at(summary: SummaryJson, stage: Stage) -> Estimate | None:
    """The accuracy on all test rows at a stage of a run; None if that stage was not evaluated."""
    figures = summary["test"][stage]
    return figures.accuracy if figures else None


def by_type_at(summary: SummaryJson, stage: Stage) -> Mapping[str, Estimate]:
    """Test accuracy by question type at a stage of a run; empty if that stage was not evaluated."""
    figures = summary["test"][stage]
    return figures.by_type if figures else {}


def stages_on_test(summary: SummaryJson) -> dict[str, Figures]:
    """The figures on the test rows for each stage that was evaluated."""
    before = "before warm-up" if summary["test"]["warmup"] else "before RL"
    kept = {before: summary["test"]["before"], "after warm-up": summary["test"]["warmup"]}
    return {name: figures for name, figures in kept.items() if figures} | {"after RL": summary["test"]["final"]}


def not_scored_text(rows: Mapping[str, int]) -> str:
    """A sentence with the number of rows without a score at each stage; empty if all rows have one."""
    counts = [f"{number:,} {stage}" for stage, number in rows.items() if number]
    return f"Rows not scored and left out: {', '.join(counts)}." if counts else ""


def duplicates_text(shared: int | None, searched_frac: float | None) -> str:
    """A sentence on the test images that also occur in the training split; empty if they were not counted."""
    if shared is None:
        return ""
    searched = (
        ""
        if searched_frac is None or searched_frac == 1
        else f" (looked for in {100 * searched_frac:.3g} % of its rows)"
    )
    return f"Test images found in the training split: {shared}{searched}."


def _accuracy(evaluation: Evaluation | None) -> float | None:
    return evaluation.accuracy if evaluation else None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(len(values), 1)
