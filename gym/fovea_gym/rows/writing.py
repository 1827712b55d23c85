"""Writing rows to Parquet files, with only a few rows in memory at a time."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image

from fovea_gym.utils.files import atomic_file

IMAGE_TYPE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
"""An encoded image in a cell, as Hugging Face's Image feature stores it."""
ROWS_PER_GROUP = 500
BYTES_PER_GROUP = 32 * 2**20
"""Bytes of text and pictures at which a row group is written; while it is written it is in memory twice."""


def write_rows(
    file: Path, schema: Any, rows: Iterable[Mapping[str, object]], rows_per_group: int = ROWS_PER_GROUP
) -> Path:
    """Write rows to `file` with a pyarrow schema and return the file; no partial file is left after an interruption.

    At most `rows_per_group` rows are in memory at once, fewer if they are large. Equal rows give equal bytes.
    """
    with atomic_file(file) as partial, pq.ParquetWriter(partial, schema) as writer:
        for group in _groups(rows, rows_per_group):
            writer.write_table(pa.Table.from_pylist(group, schema=schema))
    release_memory()
    return file


def release_memory() -> None:
    """Return memory that Arrow has freed to the operating system; its allocator would keep the size of a group."""
    pa.default_memory_pool().release_unused()


def _groups(rows: Iterable[Mapping[str, object]], rows_per_group: int) -> Iterator[list[Mapping[str, object]]]:
    group: list[Mapping[str, object]] = []
    num_bytes = 0
    for row in rows:
        group.append(row)
        num_bytes += _num_bytes(row)
        if len(group) == rows_per_group or num_bytes >= BYTES_PER_GROUP:
            yield group
            group, num_bytes = [], 0
    if group:
        yield group


def _num_bytes(cell: object) -> int:
    """Size in bytes of the texts and the encoded pictures in a cell."""
    match cell:
        case str() | bytes():
            return len(cell)
        case Mapping():
            return sum(map(_num_bytes, cell.values()))
        case list() | tuple():
            return sum(map(_num_bytes, cell))
    return int(getattr(cell, "nbytes", 8))


def image_cell(encoded: bytes) -> dict[str, object]:
    """An encoded image as a cell of `IMAGE_TYPE`."""
    return {"bytes": encoded, "path": None}


def png_cell(image: Image.Image | NDArray[np.uint8]) -> dict[str, object]:
    """A picture, or its RGB values [height, width, 3], as a PNG in a cell of `IMAGE_TYPE`."""
    png = io.BytesIO()
    (Image.fromarray(image) if isinstance(image, np.ndarray) else image).save(png, "PNG")
    return image_cell(png.getvalue())
