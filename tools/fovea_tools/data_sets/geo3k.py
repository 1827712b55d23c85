"""Geometry3K as files, from the Hugging Face hub or a copy: one file per split, with `problem`, `images`, `answer`.

Only a few rows are in memory at a time. Questions, answers and the bytes of the diagrams stay unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from fovea_gym.errors import DataError
from fovea_gym.rows.access import GroupCache, RowAccess
from fovea_gym.rows.readers.base import listed
from fovea_gym.rows.rows import Rows, open_rows
from fovea_gym.rows.writing import IMAGE_TYPE, image_cell, write_rows
from fovea_gym.types import ImageRef

HUB_ID = "hiyouga/geometry3k"
SPLITS = ("train", "validation", "test")
_SETTING = "--from"
_PATTERNS = ("{}.parquet", "{}-*.parquet", "data/{}-*.parquet")
_ROWS_PER_GROUP = 64
_COLUMNS = ("images", "problem", "answer")
_SCHEMA = pa.schema([("images", pa.list_(IMAGE_TYPE)), ("problem", pa.string()), ("answer", pa.string())])


def write_geo3k(folder: Path, *, source: str, splits: Sequence[str] = SPLITS) -> Iterator[Path]:
    """Write one `SPLIT.parquet` per split, and yield each when it is finished. `source` is a hub id or a folder."""
    opened = {split: _opened(source, split) for split in dict.fromkeys(splits)}
    for split, rows in opened.items():
        yield write_rows(folder / f"{split}.parquet", _SCHEMA, _cells(rows), _ROWS_PER_GROUP)


def _opened(source: str, split: str) -> Rows:
    one_group = GroupCache(max_bytes=0)  # each row is read once, in order
    rows = open_rows([_name(source, split)], setting=_SETTING, access=RowAccess(cache=one_group))
    missing = [column for column in _COLUMNS if column not in rows.columns]
    if missing:
        raise DataError(
            f"{_SETTING}: {source} has no column {listed(missing)}; its columns are {listed(rows.columns)}; to train "
            "on files of another layout, name them in environment.train_files"
        )
    return rows


def _name(source: str, split: str) -> str:
    """The name of a split for `open_rows`: a pattern of Parquet files in a folder, else a data set with its split."""
    folder = Path(source).expanduser()
    if not folder.is_dir():
        return f"{source}@{split}"
    pattern = next((one for one in (each.format(split) for each in _PATTERNS) if any(folder.glob(one))), None)
    if pattern is not None:
        return str(folder / pattern)
    if any(folder.rglob("*.parquet")):
        # without this check, a reader would take any file with the split's name in its own name for a part of the split
        there = [one for one in SPLITS if any(any(folder.glob(each.format(one))) for each in _PATTERNS)]
        raise DataError(
            f"{_SETTING}: {source} has no {' or '.join(each.format(split) for each in _PATTERNS)}; put it there, or "
            f"name the splits that it has: {' '.join(f'--split {one}' for one in there) or 'none'}"
        )
    return f"{source}@{split}"


def _cells(rows: Rows) -> Iterator[dict[str, object]]:
    for index in range(len(rows)):
        row = rows[index]
        refs = rows.image_refs(index, row["images"])
        yield {
            "images": [image_cell(_encoded(ref)) for ref in refs],
            "problem": row["problem"],
            "answer": None if row["answer"] is None else str(row["answer"]),  # a bad row stays a bad row
        }


def _encoded(ref: ImageRef) -> bytes:
    if isinstance(ref.source, bytes):
        return ref.source
    if isinstance(ref.source, str) and Path(ref.source).is_file():
        return Path(ref.source).read_bytes()
    raise DataError(
        f"{ref.where}: neither an encoded image nor a file on this machine; put the image's bytes into the row"
    )
