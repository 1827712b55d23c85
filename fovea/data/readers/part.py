"""A part of a source: `pets@train[:90%]`, in the notation of Hugging Face's datasets.

A bound is a number of rows or a percentage of them, rounded to the nearest row, and counts from the end where it is
negative. Parts that meet at a bound share no row and leave none out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from fovea.data.readers.base import Table
from fovea.errors import DataError

_PART = re.compile(r"(?P<whole>.+@[^@/\[\]]*)\[(?P<bounds>[^\[\]]*)\]")
_BOUNDS = re.compile(r"(-?\d+%?)?:(-?\d+%?)?")


def split_part(source: str) -> tuple[str, str | None]:
    """A source without the part in brackets behind its `@split`, and what stands in them; None without brackets."""
    found = _PART.fullmatch(source)
    return (found["whole"].removesuffix("@"), found["bounds"]) if found else (source, None)


def part_of(tables: Sequence[Table], bounds: str, source: str, setting: str) -> list[Table]:
    """The rows of all tables together within `bounds`; DataError where these are no bounds, or hold no row."""
    num_rows = sum(map(len, tables))
    rows = range(num_rows)[_slice(bounds, num_rows, source, setting)]
    if not rows:
        raise DataError(f"{setting}: {source} leaves none of {num_rows} rows; widen the bounds in the brackets")
    parts: list[Table] = []
    start = 0
    for table in tables:
        first, last = max(rows.start - start, 0), min(rows.stop - start, len(table))
        if first < last:
            parts.append(PartOfTable(table, range(first, last)))
        start += len(table)
    return parts


def _slice(bounds: str, num_rows: int, source: str, setting: str) -> slice:
    found = _BOUNDS.fullmatch(bounds.replace(" ", ""))
    if found is None:
        raise DataError(
            f"{setting}: {source}: [{bounds}] is no part of a split; write [:1000], [1000:], [:90%] or [-10%:]"
        )
    return slice(*(None if bound is None else _row(bound, num_rows) for bound in found.groups()))


def _row(bound: str, num_rows: int) -> int:
    return round(num_rows * int(bound[:-1]) / 100) if bound.endswith("%") else int(bound)


class PartOfTable:
    """Consecutive rows of a table, which keep the names that they have in it."""

    def __init__(self, table: Table, rows: range) -> None:
        self._table = table
        self._rows = rows
        self.name, self.key, self.folder, self.columns = table.name, table.key, table.folder, table.columns

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> dict[str, object]:
        return self._table.row(self._rows[index])

    def place(self, index: int) -> str:
        return self._table.place(self._rows[index])

    def column(self, name: str) -> Iterable[object]:
        return (cell for index, cell in enumerate(self._table.column(name)) if index in self._rows)
