"""Builders of a run's outputs: trackers, profile, peak FLOP/s for MFU, and the table of parameters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from rich.table import Table
from rich.text import Text

from fovea.config.loading import public_settings
from fovea.config.run import Config
from fovea.config.sections import Log
from fovea.metrics.profile import StepProfile
from fovea.metrics.progress import Progress
from fovea.metrics.throughput import known_peak_tflops
from fovea.metrics.tracker import ConnectsTracker, Tracker
from fovea.metrics.trackers import TensorBoardTracker, TrackedRun, TrackerSink
from fovea.train.base import ModelFacts


class ChosenTracker(NamedTuple):
    """A tracker that the settings choose and whose package is installed."""

    name: str
    setting: str
    """The setting that chooses the tracker, with its value."""
    connect: Callable[[Path, TrackedRun], Tracker]
    """Connects the run in a folder to the tracker; raises ConfigError, or any error of the package."""


def chosen_trackers(log: Log) -> list[ChosenTracker]:
    """The chosen trackers except TensorBoard; MissingExtraError, with the install command, if a package is missing."""
    chosen = []
    if (project := log.wandb_project) is not None:
        from fovea.metrics.wandb import WandbTracker

        def wandb(folder: Path, run: TrackedRun) -> Tracker:
            return WandbTracker(folder, project=project, run_id=run.id)

        chosen.append(ChosenTracker("wandb", f"log.wandb_project={project}", wandb))
    if (experiment := log.mlflow_experiment) is not None:
        from fovea.metrics.mlflow import MlflowTracker

        def mlflow(folder: Path, run: TrackedRun) -> Tracker:
            goes_on = run.last_step > 0
            return MlflowTracker(experiment=experiment, run_name=folder.name, run_id=run.id, goes_on=goes_on)

        chosen.append(ChosenTracker("mlflow", f"log.mlflow_experiment={experiment}", mlflow))
    if (swanlab_project := log.swanlab_project) is not None:
        from fovea.metrics.swanlab import SwanlabTracker

        def swanlab(folder: Path, run: TrackedRun) -> Tracker:
            return SwanlabTracker(folder, project=swanlab_project, run_id=run.id)

        chosen.append(ChosenTracker("swanlab", f"log.swanlab_project={swanlab_project}", swanlab))
    if (tracker := log.tracker) is not None:
        assert isinstance(tracker, ConnectsTracker), tracker.name

        def of_package(folder: Path, run: TrackedRun) -> Tracker:
            return tracker.connect(folder, run.id)

        chosen.append(ChosenTracker(tracker.name, f"log.tracker={tracker.name}", of_package))
    return chosen


def make_trackers(config: Config, folder: Path, start_step: int, warn: Callable[[str], None]) -> list[TrackerSink]:
    """Make the sinks of the chosen trackers.

    A new run connects to them at once, and ends if that fails. A resumed run connects at its next step, and only warns
    of failures with `warn`, since it has steps to lose.
    """
    # a run that resumes from a named checkpoint gets a separate curve, since trackers cannot take steps back
    goes_on = start_step > 0 and config.resume_from is None
    settings = public_settings(config)
    sinks = []
    for each in chosen_trackers(config.log):
        run = TrackedRun(folder / f"{each.name}_run.json", goes_on=goes_on)
        connect = partial(each.connect, folder, run)
        sinks.append(TrackerSink(folder, each.setting, run, connect, settings=settings, warn=warn))
    if config.log.tensorboard:
        # TensorBoard can drop the steps after the checkpoint, so the run needs no record of what was sent
        run = TrackedRun(None, goes_on=start_step > 0, last_step=start_step)
        board = partial(TensorBoardTracker, folder / "tensorboard", resume_step=start_step)
        sinks.append(TrackerSink(folder, "log.tensorboard=true", run, board, settings=settings, warn=warn))
    if not start_step:
        for sink in sinks:
            sink.open()
    return sinks


def make_profile(config: Config, folder: Path, start_step: int, progress: Progress) -> StepProfile | None:
    """Make the profiler of the next steps; None unless the settings ask for a profile and steps are left."""
    if not config.profile or start_step >= config.max_steps:
        return None
    return StepProfile(folder, start_step=start_step, max_steps=config.max_steps, say=progress.print)


def peak_tflops(settings: Log, facts: ModelFacts, progress: Progress) -> float | None:
    """Peak TFLOP/s of all training processes, from the settings or the data sheet, for `mfu`; None if unknown."""
    each = settings.peak_tflops
    if each is None and facts.device_name is not None:
        each = known_peak_tflops(facts.device_name)
        progress.print(
            f"mfu: not reported, the peak of {facts.device_name} is not known; set log.peak_tflops (dense bfloat16)"
            if each is None
            else f"mfu: a share of {each:g} TFLOP/s, dense bfloat16 by the data sheet of {facts.device_name}"
        )
    return None if each is None else each * facts.num_workers


def model_table(name: str, facts: ModelFacts) -> Table:
    """Table of trainable and total parameters of each part of the model."""
    threads = torch.get_num_threads()
    # Text, since a name is not rich markup
    title = Text(f"{name} on {facts.device}, {threads} thread{'' if threads == 1 else 's'}")
    table = Table(title=title, title_justify="left")
    for header in ("part", "trainable", "total"):
        table.add_column(header, justify="left" if header == "part" else "right")
    for row in facts.parameters:
        table.add_row(row.part, f"{row.trainable:,}", f"{row.total:,}")
    return table
