"""What every reader makes of its file."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from fovea.errors import BadRowError


class Table(Protocol):
    """The rows of one file, each read when asked for. Rows count from 0, as in pandas."""

    @property
    def name(self) -> str:
        """What error messages call the file."""
        ...

    @property
    def key(self) -> str:
        """Tells the file from all others: its full path."""
        ...

    @property
    def folder(self) -> str:
        """Where paths inside the rows start: a folder, or the URL of one."""
        ...

    @property
    def columns(self) -> Sequence[str]: ...

    def __len__(self) -> int: ...

    def row(self, index: int) -> dict[str, object]:
        """BadRowError where this row alone cannot be read."""
        ...

    def column(self, name: str) -> Iterable[object]:
        """One value per row; None where a row has none, or cannot be read."""
        ...


def column_by_rows(table: Table, name: str) -> Iterable[object]:
    """`Table.column` for files that have no columns."""
    for index in range(len(table)):
        try:
            yield table.row(index).get(name)
        except BadRowError:
            yield None


def first_line(error: Exception) -> str:
    """The first line of what another package says."""
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else type(error).__name__


def listed(names: Sequence[str], limit: int = 12) -> str:
    """Names in a sentence."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def close_column(name: str, names: Sequence[str]) -> str | None:
    """The column that may be meant."""
    return next(iter(difflib.get_close_matches(name, names, n=1)), None)


def near_files(path: Path) -> str:
    """What to do about a path where there is no file."""
    folder = path.parent
    if not folder.is_dir():
        return f"the folder {folder} does not exist; correct the path (relative ones start at {Path.cwd()})"
    names = sorted(file.name for file in folder.iterdir())
    near = difflib.get_close_matches(path.name, names, n=3)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"correct the path (the folder holds {listed(names) or 'nothing'})"
