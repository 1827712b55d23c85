"""The metrics of a run as columns, and curves that are downsampled for drawing.

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
    """The complete lines that a file has gained since it was last read."""

    lines: tuple[str, ...]
    begun_anew: bool
    """The file's content was replaced or cut, as after a resume: discard the lines that were read before."""
    share_read: float = 1.0
    """Share of the file's bytes that has been read; 1 if no complete line is left to read."""


REMEMBERED_BYTES = 256
"""Bytes kept from the start of a file and from before the reader's position, to notice that it was replaced."""


class Tail:
    """Reads a growing file, each time from where it stopped the last time."""

    def __init__(self, path: Path, within: Path | None = None) -> None:
        """Symbolic links in `path` may not lead out of the folder `within`."""
        self.path = path
        self._within = within
        self._offset = 0
        self._remembered = (b"", b"")

    def read(self, max_bytes: float = math.inf) -> Appended:
        """Read new complete lines, without newlines, until `max_bytes` are read; none while the file does not exist."""
        try:
            file = open_file(self.path, within=self._within)
        except FileNotFoundError:
            return Appended(lines=(), begun_anew=self._forget())
        with file:
            # compare content, not the inode: a new file may get the same inode number
            begun_anew = self._bytes_around(file) != self._remembered and self._forget()
            file.seek(self._offset)
            lines, until, share_read = list[str](), self._offset + max_bytes, 1.0
            for line in lines_of(file, self.path):
                if self._offset >= until:
                    share_read = self._offset / os.fstat(file.fileno()).st_size
                    break
                if line.endswith(b"\n"):  # a last line without a newline is still being written
                    lines.append(line[:-1].decode("utf-8", errors="replace"))
                    self._offset += len(line)
            self._remembered = self._bytes_around(file)
        return Appended(lines=tuple(lines), begun_anew=begun_anew, share_read=share_read)

    def _bytes_around(self, file: BinaryIO) -> tuple[bytes, bytes]:
        """The first and the last bytes of the part that was read."""
        size = min(REMEMBERED_BYTES, self._offset)
        file.seek(0)
        first = file.read(size)
        file.seek(self._offset - size)
        return first, file.read(size)

    def _forget(self) -> bool:
        """Start again at the beginning of the file; returns True if something had been read before."""
        had_read = self._offset > 0
        self._offset, self._remembered = 0, (b"", b"")
        return had_read


CHUNK_BYTES = 4 * 2**20
"""Bytes of metrics.jsonl in memory at a time: the file of a long run has hundreds of MiB."""
MAX_POINTS = 400
"""Maximum number of points of a curve, about one per two pixels of a chart."""
MAX_PARTS = 32
"""Maximum number of parts of the reward that are compared with each other; the overview shows fewer."""
Total: TypeAlias = Literal["seconds", "tokens"]
"""Alternatives to the step as x axis: wall time of the steps, or completion tokens."""
_PART = re.compile(r"reward/[^/]+", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A metric by step. Each point is the mean over consecutive steps, with the least and the greatest value."""

    steps_B: NDArray[np.float64]
    means_B: NDArray[np.float64]
    lows_B: NDArray[np.float64]
    highs_B: NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """The running total of a quantity, by step."""

    steps_B: NDArray[np.float64]
    totals_B: NDArray[np.float64]


@dataclass(slots=True)
class _Column:
    """The values of one metric; a step without the metric has no entry."""

    steps: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))


class Curves:
    """The columns of metrics.jsonl; `refresh` adds the rows that the file has gained."""

    def __init__(self, run_dir: Path) -> None:
        self._tail = Tail(run_dir / METRICS_FILE, run_dir)
        self._columns: dict[str, _Column] = {}
        self.last_step, self.num_steps = 0, 0
        self.share_read = 1.0
        """Share of metrics.jsonl that has been read, in 0..1."""
        self._damage: DataError | None = None

    def refresh(self, seconds: float = math.inf) -> None:
        """Read the appended lines, for about `seconds`; DataError for a line that does not hold metrics."""
        until = monotonic() + seconds
        self._add(self._tail.read(CHUNK_BYTES))
        while self.share_read < 1 and monotonic() < until:
            self._add(self._tail.read(CHUNK_BYTES))

    def _add(self, appended: Appended) -> None:
        self.share_read = appended.share_read
        if appended.begun_anew:
            self._columns, self.last_step, self.num_steps, self._damage = {}, 0, 0, None
        if self._damage is not None:
            raise self._damage  # until the file is replaced: curves that lack steps would look complete
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
        """Total seconds or completion tokens up to each step; no points if the run did not record them."""
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
        """Parts of the reward that equal the reward, or an earlier part, in every step."""
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
        """The finite values of a metric, only from the `last` steps if given; empty for an unknown metric."""
        column = self._columns.get(name, _Column())
        values_N = np.array(column.values)
        if last is not None:
            values_N = values_N[np.array(column.steps) > self.last_step - last]
        finite_N: NDArray[np.float64] = values_N[np.isfinite(values_N)]
        return finite_N

    def curve(self, name: str) -> Curve:
        """The curve of a metric; KeyError for an unknown metric."""
        column = self._columns[name]
        return downsampled(np.array(column.steps), np.array(column.values), MAX_POINTS)


def downsampled(steps_N: NDArray[np.float64], values_N: NDArray[np.float64], max_points: int) -> Curve:
    """A curve of at most `max_points` points, each over equally many steps; non-finite values are left out."""
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
"""Longest time per refresh for steps missing from the index, since a page waits. The next refresh continues."""


class SampleIndex:
    """Index entries of steps in the order in which they were found; a repeated step has a later entry too."""

    def __init__(self, run_dir: Path, clock: Callable[[], float] = monotonic) -> None:
        self._run_dir = run_dir
        self._tail = Tail(samples_folder(run_dir) / INDEX_FILE, run_dir)
        self._clock = clock
        self._entries: list[IndexedStep] = []
        self._known: set[int] = set()
        self._listed_ns = 0

    def refresh(self) -> None:
        """Read the entries appended to the index since the last refresh, and some of the steps missing from it."""
        for line in self._tail.read().lines:
            try:
                self._add(index_line(line))
            except DataError:
                continue  # the step's records are read below instead
        self._read_unlisted()

    def _read_unlisted(self) -> None:
        """Read steps that are missing from the index, for as long as a page may wait."""
        folder = samples_folder(self._run_dir)
        # list files only if the folder changed: listing ten thousand files takes longer than the rest of a poll
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
        """The greatest step so far; None if no step was recorded."""
        return max(self._known, default=None)

    def after(self, count: int) -> Sequence[IndexedStep]:
        """All entries but the first `count` that were found."""
        return self._entries[count:]

    def _add(self, entry: IndexedStep) -> None:
        self._known.add(entry.step)
        self._entries.append(entry)

    def _read(self, step: int) -> IndexedStep:
        """The entry of a step missing from the index, as after a kill; without groups if its file is damaged."""
        try:
            records = read_step(self._run_dir, step)
        except (DataError, FileNotFoundError):
            records = ()
        return indexed(step, records)
