"""Builder of the experiment trackers that the settings choose."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fovea.config.loading import public_settings
from fovea.config.run import Config, Log
from fovea.metrics.tensorboard import TensorBoardTracker
from fovea.metrics.tracker import ConnectsTracker, Tracker
from fovea.metrics.tracker_sink import TrackedRun, TrackerSink


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenTracker:
    """A tracker that the settings choose; its package is installed."""

    name: str
    setting: str
    """The setting that chose it, with its value."""
    connect: Callable[[Path, TrackedRun], Tracker]
    """Connects the run of this folder; raises ConfigError, or whatever the package raises."""


def chosen_trackers(log: Log) -> list[ChosenTracker]:
    """The chosen trackers but TensorBoard; MissingExtraError, with the install line, for one without its package."""
    chosen = []
    if (project := log.wandb_project) is not None:
        from fovea.metrics.wandb import WandbTracker

        chosen.append(
            ChosenTracker(
                name="wandb",
                setting=f"log.wandb_project={project}",
                connect=lambda folder, run: WandbTracker(folder, project=project, run_id=run.id),
            )
        )
    if (experiment := log.mlflow_experiment) is not None:
        from fovea.metrics.mlflow import MlflowTracker

        chosen.append(
            ChosenTracker(
                name="mlflow",
                setting=f"log.mlflow_experiment={experiment}",
                connect=lambda folder, run: MlflowTracker(
                    experiment=experiment, run_name=folder.name, run_id=run.id, goes_on=run.last_step > 0
                ),
            )
        )
    if (swanlab_project := log.swanlab_project) is not None:
        from fovea.metrics.swanlab import SwanlabTracker

        chosen.append(
            ChosenTracker(
                name="swanlab",
                setting=f"log.swanlab_project={swanlab_project}",
                connect=lambda folder, run: SwanlabTracker(folder, project=swanlab_project, run_id=run.id),
            )
        )
    if (tracker := log.tracker) is not None:
        assert isinstance(tracker, ConnectsTracker), tracker.name
        chosen.append(
            ChosenTracker(
                name=tracker.name,
                setting=f"log.tracker={tracker.name}",
                connect=lambda folder, run: tracker.connect(folder, run.id),
            )
        )
    return chosen


def make_trackers(config: Config, folder: Path, start_step: int, warn: Callable[[str], None]) -> list[TrackerSink]:
    """Make the sinks of the chosen trackers.

    A new run connects to them at once, and ends where that fails. One that goes on has steps to lose: it connects with
    its next step, and `warn` says what fails.
    """
    # a run that goes back to a checkpoint that was named gets a curve of its own: trackers take no step back
    goes_on = start_step > 0 and config.resume_from is None
    settings = public_settings(config)
    sinks = []
    for each in chosen_trackers(config.log):
        run = TrackedRun(folder / f"{each.name}_run.json", goes_on=goes_on)
        connect = partial(each.connect, folder, run)
        sinks.append(TrackerSink(folder, each.setting, run, connect, settings=settings, warn=warn))
    if config.log.tensorboard:
        sinks.append(_tensorboard(folder, start_step, settings, warn))
    if not start_step:
        for sink in sinks:
            sink.open()
    return sinks


def _tensorboard(
    folder: Path, start_step: int, settings: Mapping[str, object], warn: Callable[[str], None]
) -> TrackerSink:
    # it takes back the steps after the checkpoint, so that nothing need be kept of what it was sent
    run = TrackedRun(None, goes_on=start_step > 0, last_step=start_step)
    connect = partial(TensorBoardTracker, folder / "tensorboard", resume_step=start_step)
    return TrackerSink(folder, "log.tensorboard=true", run, connect, settings=settings, warn=warn)
