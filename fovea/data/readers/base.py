"""The interface of all readers of data files, and what their error messages share."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from fovea.errors import BadRowError


class Table(Protocol):
    """The rows of one file, each read on access by its index from 0."""

    @property
    def name(self) -> str:
        """The file's name in error messages."""
        ...

    @property
    def key(self) -> str:
        """A unique name of the file: its full path."""
        ...

    @property
    def folder(self) -> str | None:
        """The folder, or the URL of one, that paths inside the rows are relative to and must not leave.

        None for rows of the user's own code, whose paths may lead anywhere.
        """
        ...

    @property
    def columns(self) -> Sequence[str]: ...

    def __len__(self) -> int: ...

    def row(self, index: int) -> dict[str, object]:
        """Read one row; BadRowError where it alone cannot be read."""
        ...

    def place(self, index: int) -> str:
        """The row as messages name it: `line 3` as an editor counts lines, else `row 2` as pandas counts rows."""
        ...

    def column(self, name: str) -> Iterable[object]:
        """Values of a column, one per row; None where a row has none, or cannot be read."""
        ...


def column_by_rows(table: Table, name: str) -> Iterable[object]:
    """`Table.column` for files stored by row: every row is read for one of its values."""
    for index in range(len(table)):
        try:
            yield table.row(index).get(name)
        except BadRowError:
            yield None


def first_line(error: Exception) -> str:
    """The first line of another package's error, cut at 300 characters; the error's class where it has no text."""
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else type(error).__name__


def listed(names: Sequence[str], limit: int = 12) -> str:
    """The first `limit` names as part of a sentence, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def near_files(path: Path) -> str:
    """The fix for a path without a file: near file names, or what the folder holds."""
    folder = path.parent
    if not folder.is_dir():
        return f"the folder {folder} does not exist; correct the path (relative ones start at {Path.cwd()})"
    names = sorted(file.name for file in folder.iterdir())
    near = difflib.get_close_matches(path.name, names, n=3)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"correct the path (the folder holds {listed(names) or 'nothing'})"
