"""Bad rows of a run, each listed once with its reason, in memory and in `bad_rows.jsonl` of the run folder.

The file grows by a line per row. A checkpoint stores the number of lines; a resumed run deletes the later ones, and
damaged ones, and counts as if it had never stopped; after damage, another resume from the same checkpoint keeps as
many later lines as were lost.
"""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from pathlib import Path

from fovea.types import Metrics
from fovea_gym.errors import OTHER, BadRowError, DataError
from fovea_gym.rows.tasks import RowPlace
from fovea_gym.utils.bounded import append_to, read_lines
from fovea_gym.utils.files import write_atomically

SKIP = "set data.on_bad_row=skip"
BAD_ROWS_FILE = "bad_rows.jsonl"


def with_skip(error: DataError) -> DataError:
    """The error that ends a run at a bad row, with the setting that skips such rows; other errors as they are."""
    if not isinstance(error, BadRowError):
        return error
    return BadRowError(error.problem, error.reason, f"{error.fix}, or {SKIP}" if error.fix else SKIP)


class BadRows:
    """The bad rows of a run, shared by all its splits; kept in memory only where there is no folder."""

    def __init__(self, folder: Path | None = None, *, resume_at: int = 0) -> None:
        self._file = folder / BAD_ROWS_FILE if folder else None
        self._reasons: dict[str, str] = {}
        self.num_lost = 0
        """Lines before the checkpoint that are damaged or missing; their rows are listed again when they are found."""
        if self._file is not None:
            lines = islice(read_lines(self._file), resume_at) if self._file.exists() else ()
            kept = [(line, row) for line in lines if (row := _row_of(line)) is not None]
            self._reasons = dict(row for _, row in kept)
            self.num_lost = resume_at - len(kept)
            if self._file.exists():
                write_atomically(self._file, b"".join(line for line, _ in kept))

    def __contains__(self, key: str) -> bool:
        return key in self._reasons

    def __len__(self) -> int:
        return len(self._reasons)

    def add(self, place: RowPlace, error: DataError) -> None:
        """List a row with its error, unless it is listed already."""
        if place.key in self._reasons:
            return
        reason = error.reason if isinstance(error, BadRowError) else OTHER
        self._reasons[place.key] = reason
        if self._file is not None:
            line = {"key": place.key, "row": place.where, "reason": reason, "error": str(error)}
            with append_to(self._file) as file:
                file.write(json.dumps(line) + "\n")

    def keep_first(self, num_rows: int) -> None:
        """Forget all but the first rows; the others are listed again when they are found again."""
        self._reasons = dict(islice(self._reasons.items(), num_rows))
        if self._file is not None and self._file.exists():
            write_atomically(self._file, b"".join(islice(read_lines(self._file), num_rows)))

    def metrics(self) -> Metrics:
        """Number of bad rows so far, in total and by reason."""
        counts = {
            f"data/rows_skipped/{reason}": float(n) for reason, n in sorted(Counter(self._reasons.values()).items())
        }
        return {"data/rows_skipped": float(len(self))} | counts


def _row_of(line: bytes) -> tuple[str, str] | None:
    """Key and reason of a line; None for one that a crash has cut off or filled with NULs."""
    try:
        row = json.loads(line)
        return (str(row["key"]), str(row["reason"])) if line.endswith(b"\n") else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
