"""Rows of Parquet files, decoded one row group at a time and only when asked for.

Rows count from 0 in their file, as in pandas (`row 12` is `frame.iloc[12]`); images of a row count from 1.
"""

from __future__ import annotations

import bisect
import difflib
import itertools
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import overload

import pyarrow as pa
import pyarrow.parquet as pq

from fovea.data.images import is_url
from fovea.errors import DataError
from fovea.types import ImageRef

# Rows are drawn in random order: with fewer decoded groups than a file has, each row costs a whole group.
_CACHE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class _RowGroup:
    file: pq.ParquetFile
    path: Path
    index: int
    """Of this group in its file."""
    first_row: int
    """In its file."""
    num_rows: int


class ParquetRows(Sequence[Mapping[str, object]]):
    """All rows of some Parquet files, in order.

    `columns` are those that must exist, each with the setting that asks for it, so that an error can name it:
    `[("environment.prompt_key", "problem")]`. `setting` is the one that gave the files.
    """

    def __init__(
        self,
        files: Sequence[str],
        *,
        columns: Sequence[tuple[str, str]] = (),
        setting: str = "environment.train_files",
    ) -> None:
        if not files:
            raise DataError(f"{setting} is empty, so there are no rows; name at least one Parquet file")
        opened = [(Path(file), _open(file, setting)) for file in files]
        for path, file in opened:
            _check_columns(path, file.schema_arrow.names, columns)
        self._groups = [group for path, file in opened for group in _row_groups(path, file)]
        self._ends = list(itertools.accumulate(group.num_rows for group in self._groups))
        if not len(self):
            raise DataError(f"{setting}: {', '.join(files)} holds no rows; name a file with rows")
        self._decoded: OrderedDict[int, pa.Table] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> Mapping[str, object]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Mapping[str, object]]: ...
    def __getitem__(self, index: int | slice) -> Mapping[str, object] | Sequence[Mapping[str, object]]:
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(len(self)))]
        group, offset = self._locate(index)
        row: dict[str, object] = self._decode(group).slice(offset, 1).to_pylist()[0]
        return row

    def column(self, name: str) -> list[object]:
        """One column of all rows, without decoding the others."""
        files = {group.path: group.file for group in self._groups}
        return [cell for file in files.values() for cell in file.read(columns=[name])[name].to_pylist()]

    def where(self, index: int) -> str:
        """What an error message calls a row: `train.parquet row 12`."""
        group, offset = self._locate(index)
        found = self._groups[group]
        return f"{found.path.name} row {found.first_row + offset}"

    def folder(self, index: int) -> Path:
        """The folder of the row's file, to which paths inside the row are relative."""
        return self._groups[self._locate(index)[0]].path.parent

    def _locate(self, index: int) -> tuple[int, int]:
        row = range(len(self))[index]
        group = bisect.bisect_right(self._ends, row)
        return group, row - (self._ends[group] - self._groups[group].num_rows)

    def _decode(self, group: int) -> pa.Table:
        with self._lock:
            if group not in self._decoded:
                self._decoded[group] = _read(self._groups[group])
                self._drop_oldest()
            self._decoded.move_to_end(group)
            return self._decoded[group]

    def _drop_oldest(self) -> None:
        num_bytes = sum(table.nbytes for table in self._decoded.values())
        while num_bytes > _CACHE_BYTES and len(self._decoded) > 1:
            num_bytes -= self._decoded.popitem(last=False)[1].nbytes


def image_refs(*cells: object, where: str, folder: Path) -> tuple[ImageRef, ...]:
    """The images of a row's cells, counted from 1 over all of them.

    A cell is one image or a list of them: encoded bytes, a path relative to `folder`, a {bytes, path} struct;
    None is no image.
    """
    present = [cell for cell in cells if cell is not None]
    images = [image for cell in present for image in (cell if isinstance(cell, list) else [cell])]
    return tuple(_image_ref(image, f"{where}, image {n}", folder) for n, image in enumerate(images, start=1))


def _image_ref(image: object, where: str, folder: Path) -> ImageRef:
    if isinstance(image, dict):
        content = image.get("bytes")
        image = image.get("path") if content is None else content
    if isinstance(image, bytes):
        return ImageRef(source=image, where=where)
    if isinstance(image, str) and image:
        return ImageRef(source=image if is_url(image) else _inside(folder, image, where), where=where)
    raise DataError(
        f"{where}: a value of type {type(image).__name__} is no image; store encoded bytes, a path or a "
        "{bytes, path} struct, or set data.on_bad_row=skip"
    )


def _inside(folder: Path, image: str, where: str) -> str:
    """A data set that somebody else wrote must not reach for other files of this machine."""
    path = (folder / image).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise DataError(
            f"{where}: the path {image} leads out of the folder of the data file; move the image below that folder, "
            "store its bytes in the row, or set data.on_bad_row=skip"
        )
    return str(path)


def _open(name: str, setting: str) -> pq.ParquetFile:
    path = Path(name)
    if is_url(name):
        raise DataError(f"{setting}: {name} is not on this machine, and only local files are read so far; download it")
    if not path.is_file():
        raise DataError(f"{setting}: no such file {path}; {_near(path)}")
    try:
        return pq.ParquetFile(path, memory_map=True)
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{setting}: {path} is not a Parquet file that can be read ({_first_line(error)}); "
            "write it again, for example with pandas: frame.to_parquet(path)"
        ) from error


def _near(path: Path) -> str:
    folder = path.parent
    if path.is_dir():
        names = sorted(file.name for file in path.glob("*.parquet"))
        return f"it is a folder; name the files in it ({_listed(names) or 'it holds no *.parquet'})"
    if not folder.is_dir():
        return f"the folder {folder} does not exist; correct the path (relative ones start at {Path.cwd()})"
    names = sorted(file.name for file in folder.iterdir())
    near = difflib.get_close_matches(path.name, names, n=3)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"correct the path (the folder holds {_listed(names) or 'nothing'})"


def _check_columns(path: Path, names: Sequence[str], columns: Sequence[tuple[str, str]]) -> None:
    for setting, column in columns:
        if column not in names:
            near = difflib.get_close_matches(column, names, n=1)
            fix = f"set {setting}={near[0]}" if near else f"set {setting} to one of them"
            raise DataError(f"{setting}: {path.name} has no column {column!r}; its columns are {_listed(names)}; {fix}")


def _row_groups(path: Path, file: pq.ParquetFile) -> Iterable[_RowGroup]:
    first_row = 0
    for index in range(file.metadata.num_row_groups):
        num_rows: int = file.metadata.row_group(index).num_rows
        yield _RowGroup(file, path, index, first_row, num_rows)
        first_row += num_rows


def _read(group: _RowGroup) -> pa.Table:
    try:
        return group.file.read_row_group(group.index, use_threads=False)
    except (pa.ArrowException, OSError) as error:
        last_row = group.first_row + group.num_rows - 1
        raise DataError(
            f"{group.path.name} rows {group.first_row} to {last_row} cannot be decoded "
            f"({_first_line(error)}), so the file is damaged; copy or write it again"
        ) from error


def _listed(names: Sequence[str], limit: int = 12) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
