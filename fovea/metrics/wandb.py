"""Weights & Biases as a tracker; the only file that imports wandb (extra: wandb)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from fovea.metrics.tracker import TrackedSample
from fovea.utils.installing import pip_install
from fovea_gym.errors import ConfigError, MissingExtraError, first_line

try:
    import wandb
except ModuleNotFoundError as error:
    raise MissingExtraError(
        f"log.wandb_project is set, but {error.name} is not installed; {pip_install('wandb')}, or set "
        "log.wandb_project=null"
    ) from error


class WandbTracker:
    """A W&B run with the given id; an existing run is continued."""

    def __init__(self, run_dir: Path, *, project: str, run_id: str) -> None:
        try:
            self._run = wandb.init(project=project, name=run_dir.name, id=run_id, resume="allow", dir=str(run_dir))
        except wandb.Error as error:
            raise ConfigError(
                f"log.wandb_project={project}: {first_line(error)}; run `wandb login`, set WANDB_API_KEY, or set "
                "WANDB_MODE=offline to log only on this machine"
            ) from error
        # Fovea's `step` is the x axis, because W&B's step counter only grows, even when a run is resumed
        self._run.define_metric("*", step_metric="step")

    def begin(self, settings: Mapping[str, object]) -> None:
        self._run.config.update(dict(settings))

    def write(self, step: int, metrics: Mapping[str, float], samples: Sequence[TrackedSample]) -> None:
        images = [wandb.Image(sample.image, caption=sample.caption) for sample in samples]
        self._run.log({"step": step, **metrics} | ({"samples": images} if images else {}))

    def close(self) -> None:
        self._run.finish()
