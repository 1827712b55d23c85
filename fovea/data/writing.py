"""Rows into Parquet files: a few in memory at a time, and a file is complete or not there."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image

IMAGE_TYPE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
"""An encoded image in a cell, as Hugging Face's Image feature stores it."""
ROWS_PER_GROUP = 500


def write_rows(
    file: Path, schema: Any, rows: Iterable[Mapping[str, object]], rows_per_group: int = ROWS_PER_GROUP
) -> Path:
    """Equal bytes for equal rows. `schema` is pyarrow's; `rows_per_group` are in memory at once."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{uuid4().hex}.partial")
    left = iter(rows)
    try:
        with pq.ParquetWriter(partial, schema) as writer:
            while group := list(islice(left, rows_per_group)):
                writer.write_table(pa.Table.from_pylist(group, schema=schema))
        os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)
    return file


def image_cell(encoded: bytes) -> dict[str, object]:
    """A cell of `IMAGE_TYPE`."""
    return {"bytes": encoded, "path": None}


def png_cell(image: Image.Image | NDArray[np.uint8]) -> dict[str, object]:
    """A picture, or RGB values, as a cell of `IMAGE_TYPE`."""
    png = io.BytesIO()
    (Image.fromarray(image) if isinstance(image, np.ndarray) else image).save(png, "PNG")
    return image_cell(png.getvalue())
