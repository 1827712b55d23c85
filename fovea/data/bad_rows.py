"""The rows that a run has dropped: each once, under its reason, in memory and in `bad_rows.jsonl` of the run folder.

The file grows by a line per row. A checkpoint keeps the number of lines, so that a resumed run drops what was found
after it, and counts as if it had never stopped.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from fovea.data.order import Place
from fovea.errors import BadRowError, DataError
from fovea.types import Metrics
from fovea.utils.files import write_atomically

BAD_ROWS_FILE = "bad_rows.jsonl"
OTHER = "other"
"""Reason of an environment's errors that name none."""


class BadRows:
    """The list of one run, which all its splits share; without a folder it is kept in memory alone."""

    def __init__(self, folder: Path | None = None, *, resume_at: int = 0) -> None:
        self._file = folder / BAD_ROWS_FILE if folder else None
        self._reasons: dict[str, str] = {}
        if self._file is not None and self._file.exists():
            self._keep_first(self._file, resume_at)

    def __contains__(self, key: str) -> bool:
        return key in self._reasons

    def __len__(self) -> int:
        return len(self._reasons)

    def add(self, place: Place, error: DataError) -> None:
        """Note a row, unless it is known."""
        if place.key in self._reasons:
            return
        reason = error.reason if isinstance(error, BadRowError) else OTHER
        self._reasons[place.key] = reason
        if self._file is not None:
            line = {"key": place.key, "row": place.where, "reason": reason, "error": str(error)}
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def metrics(self) -> Metrics:
        """Counts so far, of all and by reason."""
        counts = {
            f"data/rows_skipped/{reason}": float(n) for reason, n in sorted(Counter(self._reasons.values()).items())
        }
        return {"data/rows_skipped": float(len(self))} | counts

    def _keep_first(self, file: Path, num_lines: int) -> None:
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)[:num_lines]
        write_atomically(file, "".join(lines).encode())
        self._reasons = {row["key"]: row["reason"] for row in map(json.loads, lines)}
