"""Rows of the sources that a setting names, as one sequence whose rows are read on access.

A source is a file (Parquet, JSONL, JSON, CSV, TSV), a glob pattern of files, a URL of either, a folder with a table of
images, or a Hugging Face data set (a folder or `owner/name`). `@split` after it names one of several splits, and
brackets select a part: `@train[:90%]`, or `@[:90%]` for a source without splits.
"""

from __future__ import annotations

import bisect
import glob
import importlib
import itertools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, overload

from fovea_gym.errors import DataError, MissingExtraError
from fovea_gym.rows.access import RowAccess
from fovea_gym.rows.cells import image_refs
from fovea_gym.rows.images import is_url
from fovea_gym.rows.readers.base import FORMATS, Table, check_columns, check_unique, near_files
from fovea_gym.rows.readers.frame import ImageFolder, InMemory, MemoryTable, is_dataset, metadata_of
from fovea_gym.rows.readers.lines import csv_rows, json_array, json_lines
from fovea_gym.rows.readers.parquet import ParquetTable
from fovea_gym.rows.readers.remote import RemoteTable, expand, local_copy, part_of, split_part
from fovea_gym.types import ImageRef
from fovea_gym.utils.installing import pip_install

__all__ = ["InMemory", "Rows", "Source", "given_rows", "image_refs", "open_rows"]

Source: TypeAlias = str | os.PathLike[str] | InMemory

MADE = ("caption", "easy_vqa", "geo3k", "geospot", "geospot_europe", "readable", "visual_qa", "vqa")
"""Folders in data/ that commands such as `fovea data vqa` write."""
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")


class Rows(Sequence[Mapping[str, object]]):
    """The concatenated rows of several tables."""

    def __init__(self, tables: Sequence[Table], image_root: str | None = None, data_section: str = "") -> None:
        """`data_section` is the prefix of the setting `image_root` in errors."""
        self._tables = tables
        self._ends = list(itertools.accumulate(len(table) for table in tables))
        self._image_root = image_root
        self._data_section = data_section

    @property
    def columns(self) -> list[str]:
        """Names of the columns of all tables; a row may lack some of them."""
        return list(dict.fromkeys(name for table in self._tables for name in table.columns))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> Mapping[str, object]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Mapping[str, object]]: ...
    def __getitem__(self, index: int | slice) -> Mapping[str, object] | Sequence[Mapping[str, object]]:
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(len(self)))]
        table, place = self._locate(index)
        return table.row(place)

    def where(self, index: int) -> str:
        """The row's name in error messages: `train.parquet row 12`, `train.jsonl line 13`."""
        table, place = self._locate(index)
        return f"{table.name} {table.place(place)}"

    def key(self, index: int) -> str:
        """A unique name of the row, which contains the full path of its file."""
        table, place = self._locate(index)
        return f"{table.key} {table.place(place)}"

    def folder(self, index: int) -> str | None:
        """The folder, or its URL, that paths in the row must stay in; None if they may lead anywhere."""
        return self._image_root or self._locate(index)[0].folder

    def image_refs(self, index: int, *cells: object) -> tuple[ImageRef, ...]:
        """References to the images of a row's cells; raises BadRowError naming the row."""
        setting = f"{self._data_section}image_root"
        return image_refs(*cells, where=self.where(index), folder=self.folder(index), image_root=setting)

    def column(self, name: str) -> Iterable[object]:
        """The values of a column, one per row; None for rows without the column."""
        for table in self._tables:
            yield from table.column(name) if name in table.columns else itertools.repeat(None, len(table))

    def _locate(self, index: int) -> tuple[Table, int]:
        row = range(len(self))[index]
        table = bisect.bisect_right(self._ends, row)
        return self._tables[table], row - (self._ends[table] - len(self._tables[table]))


def open_rows(
    sources: Sequence[Source],
    *,
    columns: Sequence[tuple[str, str]] = (),
    setting: str = "sources",
    access: RowAccess | None = None,
) -> Rows:
    """Open the rows of all sources: names, paths, or rows in memory (`readers.frame`).

    `setting` is the setting that named the sources. `columns` lists the required columns, each after the setting that
    names it, for errors: `[("prompt_key", "problem")]`. Raises DataError for a source that cannot be read, lacks a
    column, or has no rows.
    """
    if not sources:
        raise DataError(f"{setting} is empty, so there are no rows; name at least one file")
    opener = _Opener(access or RowAccess(), setting)
    tables = [table for place, source in enumerate(sources) for table in opener.tables(source, place)]
    for table in tables:
        check_columns(table, columns, setting)
    if not any(len(table) for table in tables):
        names = ", ".join(table.name for table in tables)
        raise DataError(f"{setting}: {names} holds no rows; name a file with rows")
    root = opener.access.image_root
    return Rows(tables, os.path.expanduser(root) if root else None, opener.access.data_section)


def given_rows(source: InMemory, name: str) -> Rows:
    """Rows passed from Python code; `name` is their name in messages.

    DataError for a source without rows, or with duplicate or invalid column names.
    """
    table = _memory_table(source, name)
    check_unique(table.columns, f"the argument {name} has")
    for column in table.columns:
        if any("\ud800" <= character <= "\udfff" for character in column):
            raise DataError(f"{name}: the name of column {column!r:.60} contains an unpaired surrogate; rename it")
    if not len(table):
        raise DataError(f"{name} holds no rows; give at least one")
    return Rows([table])


def _memory_table(source: InMemory, name: str) -> Table:
    if not is_dataset(source):
        return MemoryTable(source, name)
    table: Table = _hub().DatasetTable(source, name, None)
    return table


def _hub() -> Any:
    """The reader module for Hugging Face data sets, which needs an optional package."""
    return importlib.import_module("fovea_gym.rows.readers.hub")


@dataclass(frozen=True, slots=True)
class _Opener:
    access: RowAccess
    setting: str

    def tables(self, source: Source, place: int) -> list[Table]:
        """The tables of one source, which is at index `place` of the setting."""
        if isinstance(source, str | os.PathLike):
            return self._named(os.fspath(source))
        return [_memory_table(source, f"{self.setting}[{place}] (from Python)")]

    def _named(self, source: str) -> list[Table]:
        whole, bounds = split_part(source)
        if bounds is None or Path(source).expanduser().exists():
            return self._whole(source)
        return part_of(self._whole(whole), bounds, source, self.setting)

    def _whole(self, source: str) -> list[Table]:
        if is_url(source):
            return [self._remote(url) for url in expand(source, self.setting)]
        path = Path(source).expanduser()
        if path.exists():
            return [self._local(path, None)]
        name, at, split = source.rpartition("@")
        if at and name and split and "/" not in split:
            return [self._split(name, split)]
        if set("*?[") & set(source):
            return [self._local(Path(found), None) for found in self._matching(str(path))]
        raise DataError(f"{self.setting}: no such file {path}; {self._fix(source, path)}")

    def _local(self, path: Path, split: str | None) -> Table:
        if not path.is_dir():
            return self._file(path)
        inner = path / split if split and (path / split).is_dir() else path
        table = metadata_of(inner)
        if table is not None and (split is None or inner != path):
            return ImageFolder(self._file(table), inner)
        return self._dataset(str(path), split)

    def _split(self, name: str, split: str) -> Table:
        folder = Path(name).expanduser()
        if folder.is_dir():
            return self._local(folder, split)
        if folder.is_file():
            raise DataError(f"{self.setting}: {name}@{split}: a file has no splits; name it without @{split}")
        if not _HUB_ID.fullmatch(name) or folder.suffix in FORMATS:
            raise DataError(f"{self.setting}: no such file or folder {folder}; {near_files(folder)}")
        return self._dataset(name, split)

    def _dataset(self, name: str, split: str | None) -> Table:
        try:
            hub = _hub()
        except ModuleNotFoundError as error:
            if error.name != "datasets":
                raise
            self._check_split(Path(name).expanduser(), split)
            raise MissingExtraError(
                f"{self.setting}: {name} is read with the package datasets, which is not installed; "
                f"{pip_install('hub')}, or name the files in it"
            ) from error
        table: Table = hub.open_dataset(name, split, self.setting)
        return table

    def _check_split(self, folder: Path, split: str | None) -> None:
        """Raise DataError if a folder holds tables for splits, but not for the named one."""
        splits = [each.parent.name for each in sorted(folder.glob("*/metadata.*")) if metadata_of(each.parent)]
        if split and splits:
            listed = ", ".join(dict.fromkeys(splits))
            raise DataError(
                f"{self.setting}: {folder}: no split {split!r}; its splits are {listed}; write {folder}@{splits[0]}"
            )

    def _remote(self, url: str) -> Table:
        _check_format(url, self.setting)
        path = local_copy(url, self.setting, self.access)
        return RemoteTable(self._file(path), url)

    def _file(self, path: Path) -> Table:
        _check_format(str(path), self.setting)
        if path.suffix == ".parquet":
            return ParquetTable(path, setting=self.setting, access=self.access)
        if path.suffix in {".jsonl", ".ndjson"}:
            return json_lines(path, self.setting)
        if path.suffix == ".json":
            return json_array(path, self.setting)
        return csv_rows(path, self.setting)

    def _matching(self, pattern: str) -> list[str]:
        found = sorted(name for name in glob.glob(pattern, recursive=True) if Path(name).is_file())
        if not found:
            raise DataError(f"{self.setting}: no file matches {pattern}; correct the pattern")
        return found

    def _fix(self, source: str, path: Path) -> str:
        if path.parts[:1] == ("data",) and path.parts[1:2] and path.parts[1] in MADE:
            return f"`fovea data {path.parts[1].replace('_', '-')}` writes it"
        hint = f" (a data set of the hub is written {source}@train)" if _HUB_ID.fullmatch(source) else ""
        return near_files(path) + ("" if path.suffix in FORMATS else hint)


def _check_format(name: str, setting: str) -> None:
    if Path(name.partition("?")[0] if is_url(name) else name).suffix not in FORMATS:
        raise DataError(f"{setting}: {name} is not one of {', '.join(FORMATS)}; convert it, or correct its ending")
