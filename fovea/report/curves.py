"""The metrics of a run as columns, and curves of few enough points to draw.

Axes: `N` steps with a value, `B` points of a curve.
"""

from __future__ import annotations

import math
import os
import re
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import BinaryIO, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fovea.metrics.jsonl import METRICS_FILE, parse_metrics
from fovea.metrics.names import is_rounding
from fovea.report.samples import INDEX_FILE, IndexedStep, index_line, indexed, read_step, sample_steps, samples_folder
from fovea_gym.errors import DataError
from fovea_gym.utils.bounded import lines_of, open_file


@dataclass(frozen=True, slots=True, kw_only=True)
class Appended:
    """The lines that were completed since the last look at a file."""

    lines: tuple[str, ...]
    begun_anew: bool
    """The file has other content or is shorter than before, as after a resume: what was read before counts no more."""
    share_read: float = 1.0
    """Share of the file's bytes that has been read, 1 where no complete line is left."""


REMEMBERED_BYTES = 256
"""Of the start of a file and before the place where its reader stopped, to notice other content."""


class Tail:
    """Reads a growing file from where it stopped the last time."""

    def __init__(self, path: Path, within: Path | None = None) -> None:
        """`within` is the folder that no link on the way may leave."""
        self.path = path
        self._within = within
        self._offset = 0
        self._remembered = (b"", b"")

    def read(self, max_bytes: float = math.inf) -> Appended:
        """New complete lines, without their newlines, until they are so many bytes; none while there is no file."""
        try:
            file = open_file(self.path, within=self._within)
        except FileNotFoundError:
            return Appended(lines=(), begun_anew=self._forget())
        with file:
            # not by its inode, whose number a new file may get again
            begun_anew = self._bytes_around(file) != self._remembered and self._forget()
            file.seek(self._offset)
            lines, until, share_read = list[str](), self._offset + max_bytes, 1.0
            for line in lines_of(file, self.path):
                if self._offset >= until:
                    share_read = self._offset / os.fstat(file.fileno()).st_size
                    break
                if line.endswith(b"\n"):  # a last line without newline is being written right now
                    lines.append(line[:-1].decode("utf-8", errors="replace"))
                    self._offset += len(line)
            self._remembered = self._bytes_around(file)
        return Appended(lines=tuple(lines), begun_anew=begun_anew, share_read=share_read)

    def _bytes_around(self, file: BinaryIO) -> tuple[bytes, bytes]:
        """The first bytes of what was read, and the last."""
        size = min(REMEMBERED_BYTES, self._offset)
        file.seek(0)
        first = file.read(size)
        file.seek(self._offset - size)
        return first, file.read(size)

    def _forget(self) -> bool:
        """Begin at the start again; returns whether something had been read before."""
        had_read = self._offset > 0
        self._offset, self._remembered = 0, (b"", b"")
        return had_read


CHUNK_BYTES = 4 * 2**20
"""Bytes of metrics.jsonl in memory at a time: a long run has hundreds of MiB."""
MAX_POINTS = 400
"""Of a curve: about one per two pixels of a chart."""
MAX_PARTS = 32
"""Parts of the reward that are compared with each other; an overview shows fewer."""
Total: TypeAlias = Literal["seconds", "tokens"]
"""Axes beside the step: wall time of the steps, and completion tokens."""
_PART = re.compile(r"reward/[^/]+", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A metric by step: means of consecutive steps, with the least and the greatest value among them."""

    steps_B: NDArray[np.float64]
    means_B: NDArray[np.float64]
    lows_B: NDArray[np.float64]
    highs_B: NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """A sum over a run's steps, by step."""

    steps_B: NDArray[np.float64]
    totals_B: NDArray[np.float64]


@dataclass(slots=True)
class _Column:
    """The values of one metric; a step without the metric has no entry."""

    steps: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))


class Curves:
    """The columns of metrics.jsonl, which grow with the file."""

    def __init__(self, run_dir: Path) -> None:
        self._tail = Tail(run_dir / METRICS_FILE, run_dir)
        self._columns: dict[str, _Column] = {}
        self.last_step, self.num_steps = 0, 0
        self.share_read = 1.0
        """Share of the file that has been read."""
        self._damage: DataError | None = None

    def refresh(self, seconds: float = math.inf) -> None:
        """Read what the run has appended, for about so many seconds; DataError for a line that holds no metrics."""
        until = monotonic() + seconds
        self._add(self._tail.read(CHUNK_BYTES))
        while self.share_read < 1 and monotonic() < until:
            self._add(self._tail.read(CHUNK_BYTES))

    def _add(self, appended: Appended) -> None:
        self.share_read = appended.share_read
        if appended.begun_anew:
            self._columns, self.last_step, self.num_steps, self._damage = {}, 0, 0, None
        if self._damage is not None:
            raise self._damage  # until the file is another one: curves with a hole would pass for the whole
        for line in appended.lines:
            try:
                row = parse_metrics(line, where=f"{self._tail.path} line {self.num_steps + 1}")
            except DataError as error:
                self._damage = error
                raise
            step = row.pop("step")
            self.last_step = int(step)
            self.num_steps += 1
            for name, value in row.items():
                column = self._columns.setdefault(name, _Column())
                column.steps.append(step)
                column.values.append(value)

    def totals(self, of: Total) -> Totals:
        """The seconds or the completion tokens of all steps up to each one; no points where they are not known."""
        seconds, rates = (self._columns.get(name, _Column()) for name in ("seconds/step", "tokens_per_second"))
        steps_N, added_N = np.array(seconds.steps), np.array(seconds.values)
        if of == "tokens":
            rate_of = dict(zip(rates.steps, rates.values, strict=True))
            added_N = added_N * np.array([rate_of.get(step, 0.0) for step in seconds.steps])
        if not added_N.any():
            return Totals(steps_B=np.empty(0), totals_B=np.empty(0))
        shown_B = np.unique(np.linspace(0, len(steps_N) - 1, MAX_POINTS).astype(np.int64))
        added_N = np.where(np.isfinite(added_N), added_N, 0)
        return Totals(steps_B=steps_N[shown_B], totals_B=np.cumsum(added_N)[shown_B])

    def repeats(self) -> list[str]:
        """Parts of the reward whose values are those of the reward or of an earlier part in every step."""
        parts = [name for name in self._columns if _PART.fullmatch(name)]
        seen, found = set[tuple[bytes, bytes]](), list[str]()
        for name in ("reward", *parts[:MAX_PARTS]):
            column = self._columns.get(name, _Column())
            key = (column.steps.tobytes(), column.values.tobytes())
            if key in seen and name in parts:
                found.append(name)
            seen.add(key)
        return found

    def rounding(self) -> list[str]:
        """Metrics whose values are rounding errors in every step."""
        return [name for name, column in self._columns.items() if is_rounding(name, column.values)]

    @property
    def names(self) -> list[str]:
        """Names of all metrics, in the order in which they first occurred."""
        return list(self._columns)

    @property
    def columns(self) -> dict[str, tuple[array[float], array[float]]]:
        """Steps and values of each metric."""
        return {name: (column.steps, column.values) for name, column in self._columns.items()}

    def finite(self, name: str, last: int | None = None) -> NDArray[np.float64]:
        """The finite values of a metric, of the `last` steps if given; empty for a name that is none."""
        column = self._columns.get(name, _Column())
        values_N = np.array(column.values)
        if last is not None:
            values_N = values_N[np.array(column.steps) > self.last_step - last]
        finite_N: NDArray[np.float64] = values_N[np.isfinite(values_N)]
        return finite_N

    def curve(self, name: str) -> Curve:
        """The curve of a metric; KeyError for a name that is none."""
        column = self._columns[name]
        return downsampled(np.array(column.steps), np.array(column.values), MAX_POINTS)


def downsampled(steps_N: NDArray[np.float64], values_N: NDArray[np.float64], max_points: int) -> Curve:
    """The curve in at most `max_points` points, each of equally many steps; values that are not finite are left out."""
    finite = np.isfinite(values_N)
    steps_N, values_N = steps_N[finite], values_N[finite]
    if len(values_N) <= max_points:
        return Curve(steps_B=steps_N, means_B=values_N, lows_B=values_N, highs_B=values_N)
    starts_B = np.linspace(0, len(values_N), max_points, endpoint=False).astype(np.int64)
    counts_B = np.diff(np.append(starts_B, len(values_N)))
    return Curve(
        steps_B=np.add.reduceat(steps_N, starts_B) / counts_B,
        means_B=np.add.reduceat(values_N, starts_B) / counts_B,
        lows_B=np.minimum.reduceat(values_N, starts_B),
        highs_B=np.maximum.reduceat(values_N, starts_B),
    )


MAX_SECONDS = 0.1
"""Of a refresh spent on steps that are in no index: a page waits for it. The next refresh goes on."""


class SampleIndex:
    """Entries of steps, in the order in which they were found; a step that was written again has a later one too."""

    def __init__(self, run_dir: Path, clock: Callable[[], float] = monotonic) -> None:
        self._run_dir = run_dir
        self._tail = Tail(samples_folder(run_dir) / INDEX_FILE, run_dir)
        self._clock = clock
        self._entries: list[IndexedStep] = []
        self._known: set[int] = set()
        self._listed_ns = 0

    def refresh(self) -> None:
        """Read what the run has appended to its index, and some of the steps that are in none."""
        for line in self._tail.read().lines:
            try:
                self._add(index_line(line))
            except DataError:
                continue  # the records themselves are read below
        self._read_unlisted()

    def _read_unlisted(self) -> None:
        """Read steps that are in no index, for as long as a page may wait."""
        folder = samples_folder(self._run_dir)
        # listing ten thousand files at every poll takes longer than all the rest of it
        changed_ns = folder.stat().st_mtime_ns if folder.exists() else 0
        if changed_ns == self._listed_ns:
            return
        until = self._clock() + MAX_SECONDS
        for step in sample_steps(self._run_dir):
            if step not in self._known:
                self._add(self._read(step))
                if self._clock() > until:
                    return
        self._listed_ns = changed_ns

    @property
    def newest(self) -> int | None:
        """The greatest step so far; None where no step was recorded."""
        return max(self._known, default=None)

    def after(self, count: int) -> Sequence[IndexedStep]:
        """The entries that were found after the first `count` ones."""
        return self._entries[count:]

    def _add(self, entry: IndexedStep) -> None:
        self._known.add(entry.step)
        self._entries.append(entry)

    def _read(self, step: int) -> IndexedStep:
        """The entry of a step that is in no index, as after a kill; without groups where its file is damaged."""
        try:
            records = read_step(self._run_dir, step)
        except (DataError, FileNotFoundError):
            records = ()
        return indexed(step, records)
