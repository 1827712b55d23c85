"""Hugging Face data sets by hub id, from a folder, or saved with `save_to_disk`; images stay encoded.

The package `datasets` (extra `hub`) maps Arrow files into memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import datasets
import datasets.data_files
import fsspec

from fovea_gym.errors import DataError, named
from fovea_gym.rows.readers.base import first_line, listed

_BESIDE = re.compile(r"hf://[^:]*|(?!.*(?:://|::)).*", re.DOTALL)
"""Patterns of files of the hub or of this machine, the only ones that a data set's own README may name."""


def _beside(pattern: str, **options: Any) -> Any:
    """fsspec's `url_to_fs` for the patterns of a data set's README, which may be a stranger's."""
    if not _BESIDE.fullmatch(pattern):
        raise DataError(f"its README names {pattern}, which is neither a file of it nor of the hub; name the files")
    return fsspec.core.url_to_fs(pattern, **options)


_LOADING = Lock()
_SAVED = ("state.json", "dataset_dict.json")


class DatasetTable:
    """One split of a data set, with rows as in Arrow: an image is a {bytes, path} struct."""

    def __init__(self, dataset: datasets.Dataset, name: str, folder: str | None) -> None:
        self.name = self.key = name
        self.folder = folder
        self._dataset = dataset.with_format("arrow")
        self.columns: Sequence[str] = dataset.column_names

    def __len__(self) -> int:
        return len(self._dataset)

    def row(self, index: int) -> dict[str, object]:
        row: dict[str, object] = self._dataset[index : index + 1].to_pylist()[0]
        return row

    def place(self, index: int) -> str:
        return f"row {index}"

    def column(self, name: str) -> Iterable[object]:
        for batch in self._dataset.select_columns([name]).iter(batch_size=1000):
            yield from batch.column(name).to_pylist()


def open_dataset(name: str, split: str | None, setting: str) -> DatasetTable:
    """Open a split of a data set in a folder or of a hub id `owner/name[:config]`; DataError where there is none."""
    folder = Path(name).expanduser()
    is_local = folder.is_dir()
    with named(partial(_unreadable, name, setting)):
        if is_local and any((folder / file).is_file() for file in _SAVED):
            found = datasets.load_from_disk(str(folder))
        else:
            path, _, config = (str(folder), "", "") if is_local else name.partition(":")
            with _without_addresses():
                found = datasets.load_dataset(path, config or None)
    root = str(folder) if is_local else str(Path(datasets.config.HF_CACHE_HOME).expanduser())
    return DatasetTable(_split_of(found, split, name, setting), f"{name}@{split}" if split else name, root)


@contextmanager
def _without_addresses() -> Iterator[None]:
    """Block in which the patterns of a README are `_beside` it; the user's own calls of `datasets` are free."""
    with _LOADING:
        datasets.data_files.url_to_fs = _beside
        try:
            yield
        finally:
            datasets.data_files.url_to_fs = fsspec.core.url_to_fs


def dataset_of(rows: Iterable[Mapping[str, object]]) -> datasets.Dataset:
    """A data set in memory; the column `images` holds lists of encoded images."""
    given = datasets.Dataset.from_list(list(rows))
    return given.cast_column("images", datasets.List(datasets.Image())) if len(given) else given


def _unreadable(name: str, setting: str, error: Exception) -> DataError:
    if isinstance(error, ConnectionError):
        fix = "check the network, set HF_ENDPOINT to a mirror, or copy its files by hand and name their folder instead"
    else:
        fix = "correct the name, or give the folder of a local copy"
    seen = f"{type(error).__name__}: {first_line(error)}"
    return DataError(f"{setting}: the data set {name} cannot be loaded ({seen}); {fix}")


def _split_of(
    found: datasets.Dataset | datasets.DatasetDict, split: str | None, name: str, setting: str
) -> datasets.Dataset:
    if isinstance(found, datasets.Dataset) and split is None:
        return found
    splits = list(found) if isinstance(found, datasets.DatasetDict) else []
    if split is None and len(splits) == 1:
        return found[splits[0]]
    if split not in splits:
        seen = f"no split {split!r}" if split else "no split named"
        fix = f"write {name}@{splits[0]}" if splits else f"write {name} without @{split}"
        raise DataError(f"{setting}: {name}: {seen}; its splits are {listed(splits) or 'none'}; {fix}")
    return found[split]
