"""The sink for an experiment tracker, which survives restarts of the run and failures of the tracker (docs/runs.md)."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from torch.utils.tensorboard import SummaryWriter

from fovea.errors import TrackerError
from fovea.metrics.log import read_metrics
from fovea.metrics.tracker import TrackedSample, Tracker, readable
from fovea_gym.errors import DataError, FoveaError, first_line, named
from fovea_gym.utils.bounded import read_file
from fovea_gym.utils.files import write_atomically
from fovea_gym.utils.shown_text import without_secrets

PAUSE_SECONDS = 60.0
"""Shortest pause between two attempts to reach a tracker that has failed."""
PAUSE_PER_ATTEMPT = 10.0
"""Length of that pause relative to the failed attempt, so that a server that times out costs a tenth of a run."""


class TrackedRun:
    """Id of a run at a tracker and the last step that the tracker has, kept in a file of the run folder.

    A continued run reuses them; a new run starts with a new id and step 0. Without a file nothing is kept, for trackers
    that can remove the steps after a checkpoint themselves.
    """

    def __init__(self, file: Path | None, *, goes_on: bool, last_step: int = 0) -> None:
        self._file = file
        self.id = uuid.uuid4().hex
        self.last_step = last_step
        if file is not None and goes_on and file.exists():
            try:
                kept = json.loads(read_file(file, within=file.parent))
                self.id, self.last_step = str(kept["id"]), int(kept["last_step"])
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
                raise DataError(f"{file} names no tracker run ({error!r}); delete it to start a new one") from error

    def has(self, step: int) -> None:
        """Record that the tracker has all steps up to this one."""
        self.last_step = step
        if self._file is not None:
            content = {"id": self.id, "last_step": step}
            write_atomically(self._file, (json.dumps(content) + "\n").encode())


class TrackerSink:
    """Sends each step of a run to a tracker exactly once, over all attempts of the run.

    If the tracker fails, a warning is printed once and the tracker is tried again after a pause; the metrics of the
    missed steps are then sent from metrics.jsonl, without samples.
    """

    def __init__(
        self,
        run_dir: Path,
        setting: str,
        run: TrackedRun,
        connect: Callable[[], Tracker],
        *,
        settings: Mapping[str, object],
        warn: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`setting` names the tracker in messages, such as `log.mlflow_experiment=demo`; `clock` is in seconds."""
        self._run_dir, self._setting, self._run = run_dir, setting, run
        self._connect, self._settings = connect, settings
        self._warn, self._clock = warn, clock
        self._tracker: Tracker | None = None
        self._failing = False
        self._retry_at = -float("inf")

    def open(self) -> Tracker:
        """Return the tracker, after connecting to it if necessary; raises FoveaError."""
        if self._tracker is None:
            fix = "make it reachable, or remove that setting"
            with named(lambda error: TrackerError(f"{self._setting}: {first_line(error)}; {fix}")):
                tracker = self._connect()
                if not self._run.last_step:
                    tracker.begin(self._settings)
            self._tracker = tracker
        return self._tracker

    def write(self, step: int, metrics: Mapping[str, float], samples: Sequence[TrackedSample] = ()) -> None:
        """Send a step and any missed earlier steps, unless the tracker has it already or has just failed."""
        if step > self._run.last_step and self._clock() >= self._retry_at:
            self._attempt(lambda: self._send(step, metrics, samples))

    def close(self) -> None:
        """Send all missing steps, and close the tracker."""
        self._attempt(self._finish)

    def _attempt(self, call: Callable[[], None]) -> None:
        started = self._clock()
        try:
            with named(lambda error: TrackerError(first_line(error))):
                call()
        except FoveaError as error:
            now = self._clock()
            self._retry_at = now + max(PAUSE_SECONDS, PAUSE_PER_ATTEMPT * (now - started))
            if not self._failing:
                self._failing = True
                reason = without_secrets(str(error))
                self._warn(
                    f"{self._setting}: failed after step {self._run.last_step} ({reason}); the run continues, "
                    f"{self._run_dir} has all metrics, and the tracker is tried again later, or with resume=auto"
                )
        else:
            if self._failing:
                self._failing = False
                self._warn(f"{self._setting}: works again, and has the metrics of all steps")

    def _send(self, step: int, metrics: Mapping[str, float], samples: Sequence[TrackedSample]) -> None:
        tracker = self.open()
        if self._run.last_step < step - 1:
            self._send_missed(before=step)
        clean = tuple(TrackedSample(image=each.image, caption=readable(each.caption)) for each in samples)
        tracker.write(step, {readable(name): value for name, value in metrics.items()}, clean)
        self._run.has(step)

    def _send_missed(self, before: float) -> None:
        for row in read_metrics(self._run_dir):
            step = int(row["step"])
            if self._run.last_step < step < before:
                metrics = {readable(name): value for name, value in row.items() if name != "step"}
                self.open().write(step, metrics, ())
                self._run.has(step)

    def _finish(self) -> None:
        self._send_missed(before=float("inf"))
        if self._tracker is not None:
            self._tracker.close()


class TensorBoardTracker:
    """Writer of TensorBoard event files; events after `resume_step` (0: a new run) are discarded."""

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
    """Markdown that shows the text unchanged: TensorBoard would load images that a model links in its answer."""
    return "\n".join(f"    {line}" for line in text.split("\n"))
