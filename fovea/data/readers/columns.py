"""The columns that a table must have, and that none may have twice."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Sequence

from fovea.data.readers.base import Table, listed
from fovea.errors import DataError


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
