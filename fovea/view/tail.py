"""A file of lines that another process appends to, each line read once."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from fovea.utils.bounded import lines_of, open_file


@dataclass(frozen=True, slots=True, kw_only=True)
class Appended:
    """The lines that were completed since the last look at a file."""

    lines: tuple[str, ...]
    begun_anew: bool
    """The file is another one or shorter than before, as after a resume: what was read before counts no more."""


class Tail:
    """Reads a growing file from where it stopped the last time."""

    def __init__(self, path: Path, within: Path | None = None) -> None:
        """`within` is the folder that no link on the way may leave."""
        self.path = path
        self._within = within
        self._offset = 0
        self._identity: tuple[int, int] | None = None

    def read(self) -> Appended:
        """New complete lines, without their newlines; none while there is no file."""
        try:
            file = open_file(self.path, within=self._within)
        except FileNotFoundError:
            return Appended(lines=(), begun_anew=self._forget())
        with file:
            status = os.fstat(file.fileno())
            identity = (status.st_dev, status.st_ino)
            begun_anew = (identity != self._identity or status.st_size < self._offset) and self._forget()
            self._identity = identity
            file.seek(self._offset)
            # a last line without newline is being written right now
            complete = [line for line in lines_of(file, self.path) if line.endswith(b"\n")]
        self._offset += sum(map(len, complete))
        lines = tuple(line[:-1].decode("utf-8", errors="replace") for line in complete)
        return Appended(lines=lines, begun_anew=begun_anew)

    def _forget(self) -> bool:
        """Begin at the start again; returns whether something had been read before."""
        had_read = self._offset > 0
        self._offset, self._identity = 0, None
        return had_read
