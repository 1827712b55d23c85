"""A run as its folder tells of it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from fovea.metrics.log import read_metrics
from fovea.report.about import CONFIG_FILE, SUMMARY_FILE, check_run_folder
from fovea.report.summary import SummaryJson, read_summary
from fovea.types import Metrics


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
