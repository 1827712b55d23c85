"""console.txt of a run folder: what a run prints, in plain lines, whether there is a terminal or not."""

from __future__ import annotations

import io
from contextlib import suppress
from pathlib import Path

from rich.console import Console, RenderableType

from fovea.utils.bounded import append_to

CONSOLE_FILE = "console.txt"
WIDTH = 110
"""Characters of a line of a table; other lines are not broken."""


class ConsoleFile:
    """Appends what is printed to a file, which is open only meanwhile."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # in a notebook rich would show an empty output for each line as well
        self._console = Console(file=io.StringIO(), width=WIDTH, force_jupyter=False)

    def print(self, renderable: RenderableType, /, *, soft_wrap: bool | None = None) -> None:
        """Append text or a table."""
        with self._console.capture() as captured:
            self._console.print(renderable, soft_wrap=soft_wrap)
        # a copy of what the terminal shows: where the disk is full, metrics.jsonl ends the run, and says so
        with suppress(OSError), append_to(self._path) as file:
            file.write(captured.get().encode("utf-8", "replace").decode("utf-8"))
