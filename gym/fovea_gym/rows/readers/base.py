"""The interface of all readers of data files, and what their error messages share."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

from fovea_gym.errors import DataError
from fovea_gym.utils.files import atomic_file

FORMATS = (".parquet", ".jsonl", ".ndjson", ".json", ".csv", ".tsv")
"""Endings of the files that are read."""


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
        """Read one row; BadRowError if only this row cannot be read."""
        ...

    def place(self, index: int) -> str:
        """The row as messages name it: `line 3` as an editor counts lines, else `row 2` as pandas counts rows."""
        ...

    def column(self, name: str) -> Iterable[object]:
        """Values of a column, one per row; None where a row has none, or cannot be read."""
        ...


class TableView:
    """Another table under its own or another name; subclasses change its rows or columns."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self.name, self.key, self.folder, self.columns = table.name, table.key, table.folder, table.columns

    def __len__(self) -> int:
        return len(self._table)

    def row(self, index: int) -> dict[str, object]:
        return self._table.row(index)

    def place(self, index: int) -> str:
        return self._table.place(index)

    def column(self, name: str) -> Iterable[object]:
        return self._table.column(name)


def first_line(error: Exception) -> str:
    """The first line of another package's error, cut at 300 characters; the error's class where it has no text."""
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else type(error).__name__


def listed(names: Sequence[str], limit: int = 12) -> str:
    """The first `limit` names as part of a sentence, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def near_files(path: Path) -> str:
    """The fix for a path without a file: near file names, or the data files that the folder holds."""
    folder = path.parent
    if not folder.is_dir():
        return f"the folder {folder} does not exist; correct the path (relative ones start at {Path.cwd()})"
    names = sorted(file.name for file in folder.iterdir() if file.suffix in FORMATS or file.is_dir())
    near = difflib.get_close_matches(path.name, names, n=3)
    if near:
        return f"did you mean {' or '.join(near)}?"
    files = [name for name in names if Path(name).suffix in FORMATS]
    return f"correct the path (the folder holds {listed(files) or 'no data file'})"


def check_columns(table: Table, wanted: Sequence[tuple[str, str]], setting: str) -> None:
    """Raise DataError for a table that lacks a column, or has several of one name.

    `setting` named the table; `wanted` are columns, each with the setting that asks for it.
    """
    check_unique(table.columns, f"{setting}: {table.name} has")
    if len(table):
        check_named(table.columns, wanted, f"{table.name} has")


def check_unique(columns: Sequence[str], source: str) -> None:
    """Raise DataError where several of the columns that `source` has are of one name."""
    repeated = [repr(name) for name, count in Counter(columns).items() if count > 1]
    if repeated:
        raise DataError(
            f"{source} several columns called {listed(repeated)}, of which one would be read; rename or drop all but "
            "one"
        )


def check_named(columns: Sequence[str], wanted: Sequence[tuple[str, str]], source: str) -> None:
    """Raise DataError, with the nearest column there is, for a wanted one that is not among those `source` has."""
    for asking, column in wanted:
        if column not in columns:
            raise DataError(
                f"{asking}: {source} no column {column!r}; its columns are {listed(columns)}; set {asking}"
                f"{nearest([column], columns)}"
            )


def nearest(meant: Sequence[str], columns: Sequence[str]) -> str:
    """The value of a setting that should name one of these columns: the nearest to what was meant."""
    near = [found for name in meant for found in difflib.get_close_matches(name, columns, n=1)]
    return f"={near[0]}" if near else " to one of them"


def copied_once(folder: Path, name: str, make: Callable[[Path], object], setting: str) -> Path:
    """Return `folder/name`, written by `make(path)` unless it is there already; two processes may do so at once.

    Raises DataError where the disk refuses, with the `setting` that names another one.
    """
    copy = folder / name
    try:
        if not copy.exists():
            with atomic_file(copy) as partial:
                make(partial)
    except OSError as error:
        raise DataError(
            f"a copy of {name} cannot be kept in {folder} ({error.strerror or error}); make room there, or set "
            f"{setting} to a folder on another disk"
        ) from error
    return copy
