"""The index of a run's sample records: summaries of all groups, without reading the groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic

from fovea.errors import DataError
from fovea.report.records import summary_of
from fovea.report.samples import (
    BAD_CONTENT,
    INDEX_FILE,
    IndexedStep,
    index_line,
    read_step,
    sample_steps,
    samples_folder,
)
from fovea.view.tail import Tail

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
            except BAD_CONTENT:
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
        """The entry of a step of a run from before there was an index; without groups where its file is damaged."""
        try:
            records = read_step(self._run_dir, step)
        except (DataError, FileNotFoundError):
            records = ()
        return IndexedStep(step=step, groups=tuple(map(summary_of, records)))
