"""A file of lines that another process appends to, each line read once."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Appended:
    """The lines that were completed since the last look at a file."""

    lines: tuple[str, ...]
    begun_anew: bool
    """The file is another one or shorter than before, as after a resume: what was read before counts no more."""


class Tail:
    """Reads a growing file from where it stopped the last time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._identity: tuple[int, int] | None = None

    def read(self) -> Appended:
        """New complete lines, without their newlines; none while there is no file."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return Appended(lines=(), begun_anew=self._forget())
        with file:
            status = os.fstat(file.fileno())
            identity = (status.st_dev, status.st_ino)
            begun_anew = (identity != self._identity or status.st_size < self._offset) and self._forget()
            self._identity = identity
            file.seek(self._offset)
            content = file.read()
        # a last line without newline is being written right now
        complete = content[: content.rfind(b"\n") + 1]
        self._offset += len(complete)
        lines = complete.decode("utf-8", errors="replace").split("\n")[:-1]
        return Appended(lines=tuple(lines), begun_anew=begun_anew)

    def _forget(self) -> bool:
        """Begin at the start again; returns whether something had been read before."""
        had_read = self._offset > 0
        self._offset, self._identity = 0, None
        return had_read
