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
    repeated = [repr(name) for name, count in Counter(table.columns).items() if count > 1]
    if repeated:
        raise DataError(
            f"{setting}: {table.name} has several columns called {listed(repeated)}, of which one would be read; "
            "rename or drop all but one"
        )
    for asking, column in wanted:
        if column not in table.columns and len(table):
            near = difflib.get_close_matches(column, table.columns, n=1)
            fix = f"set {asking}={near[0]}" if near else f"set {asking} to one of them"
            raise DataError(
                f"{asking}: {table.name} has no column {column!r}; its columns are {listed(table.columns)}; {fix}"
            )
