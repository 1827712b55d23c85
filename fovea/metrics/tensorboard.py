"""TensorBoard as a tracker: event files in the run folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from torch.utils.tensorboard import SummaryWriter

from fovea.metrics.tracker import TrackedSample


class TensorBoardTracker:
    """Writer of event files; those of the steps after `resume_step` (0: a new run) are taken back."""

    def __init__(self, folder: Path, *, resume_step: int = 0) -> None:
        # TensorBoard discards events of the interrupted run from purge_step on
        self._writer = SummaryWriter(str(folder), purge_step=resume_step + 1 if resume_step else 0)

    def begin(self, settings: Mapping[str, object]) -> None:
        self._writer.add_text("settings", _literal(json.dumps(settings, indent=2)))

    def write(self, step: int, metrics: Mapping[str, float], samples: Sequence[TrackedSample]) -> None:
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step)
        for number, sample in enumerate(samples, start=1):
            self._writer.add_image(f"samples/{number}", np.asarray(sample.image), step, dataformats="HWC")
            self._writer.add_text(f"samples/{number}", _literal(sample.caption), step)

    def close(self) -> None:
        self._writer.close()


def _literal(text: str) -> str:
    """Markdown that shows the text as it is: TensorBoard would load the images that a model links in its answer."""
    return "\n".join(f"    {line}" for line in text.split("\n"))
