"""Metric sinks (JSONL, trackers), and timers and memory counters for the phases of a step."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, Self

import torch
from torch.profiler import record_function

from fovea.metrics.jsonl import METRICS_FILE, parse_metrics
from fovea.metrics.tracker import TrackedSample
from fovea.types import Metrics
from fovea.utils.host_waits import host_waits
from fovea_gym.errors import DataError
from fovea_gym.utils.bounded import append_to, read_lines
from fovea_gym.utils.files import json_number, write_atomically

GIB = 2**30


class Sink(Protocol):
    """A destination of metrics."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class SampleSink(Protocol):
    """A destination of metrics and, in some steps, of samples."""

    def write(self, step: int, metrics: Mapping[str, float], samples: Sequence[TrackedSample]) -> None: ...

    def close(self) -> None: ...


class MetricsLog:
    """Writes the metrics of each step to every sink, and then, with the step's samples, to every tracker."""

    def __init__(self, sinks: Sequence[Sink], trackers: Sequence[SampleSink] = ()) -> None:
        self._sinks, self._trackers = tuple(sinks), tuple(trackers)
        self._samples: Sequence[TrackedSample] = ()

    @property
    def has_trackers(self) -> bool:
        """True if added samples are shown by any tracker."""
        return bool(self._trackers)

    def add_samples(self, samples: Sequence[TrackedSample]) -> None:
        """Keep samples until the metrics of their step are written."""
        self._samples = samples

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for sink in self._sinks:
            sink.write(step, metrics)
        samples, self._samples = self._samples, ()
        for tracker in self._trackers:
            tracker.write(step, metrics, samples)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()
        for tracker in self._trackers:
            tracker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class JsonlSink:
    """Writer of metrics.jsonl: one JSON object per step, `{"step": 7, "reward": 0.5, ...}`, null for NaN and infinity.

    A resumed run first drops damaged lines and those after its checkpoint, so that every step occurs once.
    """

    def __init__(self, run_dir: Path, *, resume_step: int = 0) -> None:
        self._path = run_dir / METRICS_FILE
        kept, num_damaged, self.num_nuls = _lines_until(resume_step, self._path)
        write_atomically(self._path, "".join(kept.values()).encode())
        first = min(kept, default=1)
        self.num_lost = max(num_damaged, resume_step + 1 - first - len(kept)) if resume_step else 0
        """Number of steps before the checkpoint whose metrics are lost."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        assert "step" not in metrics, (
            f"`step` is reserved for the step number, but the metrics of step {step} hold it too"
        )
        row = {"step": step} | {key: json_number(value) for key, value in metrics.items()}
        with append_to(self._path) as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")

    def close(self) -> None:
        """Do nothing: the file is open only while a line is written."""


def read_metrics(run_dir: Path) -> list[Metrics]:
    """Read metrics.jsonl, with `step` in each row and NaN for null; an empty list if there is no file."""
    path = run_dir / METRICS_FILE
    lines = enumerate(read_lines(path, within=run_dir) if path.exists() else (), start=1)
    # a crash may have cut the last line off, or it may be being written right now
    return [
        parse_metrics(line.decode("utf-8", errors="replace"), where=f"{path} line {number}")
        for number, line in lines
        if line.endswith(b"\n")
    ]


def _lines_until(last: int, path: Path) -> tuple[dict[int, str], int, int]:
    """Lines of the steps up to `last`, by step; number of damaged lines; number of NULs in an incomplete last line.

    A failure of the machine leaves NULs in place of bytes that had not reached the disk.
    """
    kept: dict[int, str] = {}
    num_damaged = num_nuls = 0
    for content in read_lines(path, within=path.parent) if last and path.exists() else ():
        if not content.endswith(b"\n"):
            num_nuls = content.count(0)
            break
        line = content.decode("utf-8", errors="replace")
        try:
            step = int(parse_metrics(line, where=str(path))["step"])
        except DataError:
            num_damaged += 1
            continue
        if step <= last:
            kept[step] = line
    return kept, num_damaged, num_nuls


class Phases:
    """Wall time and memory of the phases of a step: `with phases("rollout"): ...`.

    The seconds of a phase that is entered several times add up; asynchronous kernels count for the phase that waits for
    them. Memory is the peak allocated by CUDA within the phase or, without CUDA, the resident memory at its end; for a
    phase that contains others or is entered again it is the maximum. Waits are those of this process for its device.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: Metrics = {}
        self._gib: Metrics = {}
        self._waits: Metrics = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        key, gib_key, start = f"seconds/{name}", f"memory/{name}_gib", self._clock()
        before, waits = set(self._gib), host_waits()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        try:
            with record_function(name):  # names the phase in profiler traces; costs microseconds without a profiler
                yield
        finally:
            self._seconds[key] = self._seconds.get(key, 0.0) + self._clock() - start
            self._waits[f"waits/{name}"] = self._waits.get(f"waits/{name}", 0.0) + host_waits() - waits
            # entering an inner phase resets CUDA's peak counter, so the outer phase must include the inner maxima
            inside = [gib for phase, gib in self._gib.items() if phase not in before]
            self._gib[gib_key] = max(_phase_gib(), self._gib.get(gib_key, 0.0), *inside)

    def seconds(self) -> Metrics:
        """Seconds per phase since the last call: `{"seconds/rollout": 0.031, ...}`."""
        seconds, self._seconds = self._seconds, {}
        return seconds

    def gib(self) -> Metrics:
        """GiB per phase since the last call: `{"memory/rollout_gib": 0.9, ...}`."""
        gib, self._gib = self._gib, {}
        return gib

    def waits(self) -> Metrics:
        """Waits of the host per phase since the last call: `{"waits/update": 3.0, ...}`."""
        waits, self._waits = self._waits, {}
        return waits


def peak_gib() -> float:
    """Peak GPU memory in GiB that this process has allocated; without CUDA, its peak resident memory."""
    return torch.cuda.max_memory_allocated() / GIB if torch.cuda.is_available() else peak_rss_gib()


def _phase_gib() -> float:
    if torch.cuda.is_available():
        return peak_gib()
    pages = Path("/proc/self/statm")  # Linux only; elsewhere the peak of the process is the best proxy
    if not pages.exists():
        return peak_rss_gib()
    return int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / GIB


def peak_rss_gib() -> float:
    """Peak resident memory of this process in GiB."""
    # VmHWM if available: on Linux ru_maxrss is inherited over fork and exec, and starts at the parent's peak
    status = Path("/proc/self/status")
    if status.exists():
        lines = status.read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 2**20  # KiB
    unit_bytes = 1 if sys.platform == "darwin" else 1024  # see getrusage(2) of macOS and Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes / GIB
