"""Weights & Biases as a metrics sink: the one file that imports wandb (extra: wandb)."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path

from fovea.errors import ConfigError, MissingExtraError, first_line

try:
    import wandb
except ModuleNotFoundError as error:
    raise MissingExtraError(
        f"log.wandb_project is set, but {error.name} is not installed; pip install wandb, or set log.wandb_project=null"
    ) from error

RUN_ID_FILE = "wandb_run_id.txt"


class WandbSink:
    """Logger to one W&B run, whose id is kept in the run folder, so that a resumed run continues the same curves.

    Steps that an interrupted run logged after its last checkpoint stay, and are logged a second time.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        project: str,
        settings: Mapping[str, object] | None = None,
        resume_step: int = 0,
    ) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        try:
            self._run = wandb.init(
                project=project,
                name=run_dir.name,
                id=_run_id(run_dir / RUN_ID_FILE, keep=resume_step > 0),
                resume="allow",
                dir=str(run_dir),
                config=dict(settings or {}),
            )
        except wandb.Error as error:
            raise ConfigError(
                f"log.wandb_project={project}: {first_line(error)}; run `wandb login`, set WANDB_API_KEY, or set "
                "WANDB_MODE=offline to log on this machine alone"
            ) from error
        # our own `step` as x axis: W&B's step counter only grows, and would reject the steps repeated after a resume
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        self._run.finish()


def _run_id(path: Path, *, keep: bool) -> str:
    if not (keep and path.exists()):
        path.write_text(uuid.uuid4().hex + "\n", encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()
