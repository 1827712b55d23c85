"""Rows in memory: a pandas DataFrame or a list of mappings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeGuard

from fovea.data.readers.base import column_by_rows


class Frame(Protocol):
    """The part of a pandas DataFrame that is used here; pandas need not be installed."""

    @property
    def columns(self) -> Iterable[Any]: ...

    @property
    def iloc(self) -> Any: ...

    def __len__(self) -> int: ...


InMemory: TypeAlias = Frame | Sequence[Mapping[str, object]]


def is_frame(source: object) -> TypeGuard[Frame]:
    """Whether a source is a DataFrame rather than a sequence of mappings."""
    return hasattr(source, "iloc") and hasattr(source, "columns")


class MemoryTable:
    """Rows in memory as a table; paths in them are relative to the working directory."""

    def __init__(self, source: InMemory, name: str) -> None:
        self._source = source
        self.name = self.key = name
        self.folder = str(Path.cwd())
        self.columns: Sequence[str] = _columns(source)

    def __len__(self) -> int:
        return len(self._source)

    def row(self, index: int) -> dict[str, object]:
        if is_frame(self._source):
            cells = [self._source.iloc[index, place] for place in range(len(self.columns))]
            return {name: _plain(cell) for name, cell in zip(self.columns, cells, strict=True)}
        assert isinstance(self._source, Sequence)
        return dict(self._source[index])

    def column(self, name: str) -> Iterable[object]:
        return column_by_rows(self, name)


def _columns(source: InMemory) -> list[str]:
    if is_frame(source):
        return [str(name) for name in source.columns]
    assert isinstance(source, Sequence)
    return list(dict.fromkeys(name for row in source for name in row))


def _plain(cell: Any) -> object:
    """A cell in Python's own types: numpy scalars and object arrays converted, pandas' missing values as None."""
    if hasattr(cell, "dtype") and hasattr(cell, "tolist") and (cell.shape == () or cell.dtype == object):
        cell = cell.tolist()
    is_missing = type(cell).__name__ in {"NAType", "NaTType"} or (isinstance(cell, float) and math.isnan(cell))
    plain: object = None if is_missing else cell
    return plain
