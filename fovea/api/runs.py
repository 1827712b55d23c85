"""Recipes by file or name, and the record of a run, read from its folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from fovea.config.recipes import find_recipe
from fovea.errors import ConfigError
from fovea.metrics.log import read_metrics
from fovea.report.about import CONFIG_FILE, SUMMARY_FILE, check_run_folder
from fovea.report.summary import SummaryJson, read_summary
from fovea.types import Metrics

Recipe: TypeAlias = str | os.PathLike[str]
"""A YAML file, or the name of a recipe that comes with Fovea."""


def recipe_files(recipe: Recipe | Sequence[Recipe] | None) -> list[Path]:
    """The files of one recipe or of several, of which later ones win; ConfigError for what is none."""
    words: Sequence[object] = [] if recipe is None else recipe if isinstance(recipe, list | tuple) else [recipe]
    return [find_recipe(_checked(word)) for word in words]


def _checked(word: object) -> Recipe:
    if isinstance(word, str | os.PathLike):
        return word
    raise ConfigError(
        f"recipe is given an object of type {type(word).__name__}; give a YAML file, a name that `fovea recipes` "
        "lists, or a list of them; settings in memory go into the argument settings"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedRun:
    """A run: `train()` returns one, and `load_run` reads one from its folder, which may be of a run that goes on."""

    folder: Path
    """The run folder, with its settings, samples, checkpoints and report (docs/runs.md)."""
    metrics: list[Metrics]
    """The metrics of every step by name, `step` included: `pandas.DataFrame(run.metrics)`.

    `python -m fovea.metrics.names` explains each.
    """
    summary: SummaryJson | None
    """Figures of the evaluations on the test rows before and after training; None for a run that has not ended."""
    model: Path | None = None
    """The folder that the model was exported to at the end of training; None where that was not asked for."""

    @property
    def config_file(self) -> Path:
        """All settings of the run, as a recipe."""
        return self.folder / CONFIG_FILE


def load_run(folder: str | os.PathLike[str]) -> TrainedRun:
    """Read a run from its folder; DataError where there is none."""
    path = Path(folder)
    check_run_folder(path)
    summary = path / SUMMARY_FILE
    return TrainedRun(
        folder=path,
        metrics=read_metrics(path),
        summary=read_summary(summary) if summary.is_file() else None,
    )
