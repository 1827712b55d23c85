"""Rows in memory, handed in from Python: a pandas DataFrame, a list of mappings, or a mapping of columns."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeGuard

from fovea_gym.errors import DataError
from fovea_gym.rows.readers.base import Table, TableView, listed


class DataFrame(Protocol):
    """The part of a pandas DataFrame that is used here; pandas need not be installed."""

    @property
    def columns(self) -> Iterable[Any]: ...

    @property
    def iloc(self) -> Any: ...

    def __len__(self) -> int: ...


class HubDataset(Protocol):
    """The part of a `datasets.Dataset` by which it is known; the package need not be installed."""

    @property
    def column_names(self) -> Any: ...

    def with_format(self, type: Any) -> Any: ...

    def __len__(self) -> int: ...


InMemory: TypeAlias = DataFrame | HubDataset | Sequence[Mapping[str, object]] | Mapping[str, Sequence[object]]


def is_frame(source: object) -> TypeGuard[DataFrame]:
    """True if a source is a DataFrame."""
    return hasattr(source, "iloc") and hasattr(source, "columns")


def is_dataset(source: object) -> TypeGuard[HubDataset]:
    """True if a source is one split of a Hugging Face data set."""
    is_split = not isinstance(source, Mapping) and hasattr(source, "__len__")
    return is_split and hasattr(source, "column_names") and hasattr(source, "with_format")


class _Cells(NamedTuple):
    """The columns of rows in memory, their number, and the cell of a column and a row."""

    columns: Sequence[str]
    num_rows: int
    cell: Callable[[int, int], object]
    """A function of the column's place and the row's."""


class MemoryTable:
    """Rows in memory as a table; DataError for a source that holds no rows of named cells."""

    folder = None

    def __init__(self, source: InMemory, name: str) -> None:
        self.name = self.key = name
        self.columns, self._num_rows, self._cell = _cells(source, name)

    def __len__(self) -> int:
        return self._num_rows

    def row(self, index: int) -> dict[str, object]:
        cells = {name: self._cell(place, index) for place, name in enumerate(self.columns)}
        return {name: _plain(cell) for name, cell in cells.items() if cell is not _ABSENT}

    def place(self, index: int) -> str:
        return f"row {index}"

    def column(self, name: str) -> Iterable[object]:
        place = self.columns.index(name)
        cells = (self._cell(place, index) for index in range(len(self)))
        return (None if cell is _ABSENT else _plain(cell) for cell in cells)


_ABSENT = object()
"""The cell of a column that this row does not have."""


def _cells(source: object, name: str) -> _Cells:
    if is_frame(source):
        frame = source
        if (levels := getattr(frame.columns, "nlevels", 1)) > 1:
            raise DataError(
                f"{name}: its columns have {levels} levels, such as {next(iter(frame.columns))!r:.60}, and a column "
                "has one name here; join them first, as by frame.columns = frame.columns.map('_'.join)"
            )
        return _Cells([str(column) for column in frame.columns], len(frame), lambda place, row: frame.iloc[row, place])
    if isinstance(source, Mapping):
        return _cells_of_columns(source, name)
    if isinstance(source, Sequence) and not isinstance(source, str | bytes):
        return _cells_of_rows(source, name)
    if isinstance(source, str | bytes | PathLike):
        raise DataError(
            f"{name}={source!r:.80} is not a table but a text or a path; read the file, such as by pandas.read_csv"
        )
    raise DataError(
        f"{name}: an object of type {type(source).__name__} holds no rows that can be read; give a pandas DataFrame, a "
        "datasets.Dataset, a list of mappings or a mapping of columns"
    )


def _cells_of_columns(source: Mapping[Any, Any], name: str) -> _Cells:
    if any(is_dataset(value) for value in source.values()):
        raise DataError(f"{name}: a data set with the splits {listed([*map(str, source)])} was given; give one of them")
    lengths = {key: len(cells) for key, cells in source.items() if _is_column(cells)}
    if len(lengths) < len(source) or len(set(lengths.values())) > 1:
        seen = listed([f"{key} {lengths.get(key, 'no list')}" for key in source])
        raise DataError(
            f"{name}: the columns of a mapping must be lists of equal length, but are: {seen}; correct them"
        )
    # a pandas Series finds its cells by label, and those of a shuffled or filtered one are not places
    columns = [cells.iloc if hasattr(cells, "iloc") else cells for cells in source.values()]
    return _Cells([*map(str, source)], next(iter(lengths.values()), 0), lambda place, row: columns[place][row])


def _is_column(cells: Any) -> bool:
    """True if its cells can be taken by place; those of a text are its characters."""
    is_other = isinstance(cells, str | bytes | Mapping | Set)
    return not is_other and hasattr(cells, "__len__") and hasattr(cells, "__getitem__")


def _cells_of_rows(source: Sequence[Any], name: str) -> _Cells:
    for index, row in enumerate(source):
        if not isinstance(row, Mapping):
            raise DataError(
                f"{name} row {index} is of type {type(row).__name__}, not a mapping of columns to cells; write it as "
                "{'image': ..., 'question': ..., 'answer': ...}"
            )
    keys = list(dict.fromkeys(key for row in source for key in row))
    return _Cells([*map(str, keys)], len(source), lambda place, row: source[row].get(keys[place], _ABSENT))


def _plain(cell: Any) -> object:
    """A cell in Python's own types: numpy scalars and object arrays converted, pandas' missing values as None."""
    if hasattr(cell, "dtype") and hasattr(cell, "tolist") and (cell.shape == () or cell.dtype == object):
        cell = cell.tolist()
    is_missing = type(cell).__name__ in {"NAType", "NaTType"} or (isinstance(cell, float) and math.isnan(cell))
    plain: object = None if is_missing else cell
    return plain


METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")


def metadata_of(folder: Path) -> Path | None:
    """The metadata table of an image folder; None where it has none."""
    return next((folder / name for name in METADATA if (folder / name).is_file()), None)


class ImageFolder(TableView):
    """The rows of an image folder's table, its columns of paths renamed to columns of images."""

    def __init__(self, table: Table, folder: Path) -> None:
        super().__init__(table)
        self._names = {column: shown_as(column) for column in table.columns}
        self.name, self.folder, self.columns = f"{folder.name}/{table.name}", str(folder), list(self._names.values())

    def row(self, index: int) -> dict[str, object]:
        return {shown_as(column): cell for column, cell in self._table.row(index).items()}

    def column(self, name: str) -> Iterable[object]:
        return self._table.column(next((own for own, shown in self._names.items() if shown == name), name))


def shown_as(column: str) -> str:
    """The name of a column of paths as a column of images; other columns keep theirs."""
    if column in {"file_name", "file_names"}:
        return "image" if column == "file_name" else "images"
    return column.removesuffix("_file_name").removesuffix("_file_names")
