"""Writing rows to Parquet files, a few in memory at a time."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from itertools import islice
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


def write_rows(
    file: Path, schema: Any, rows: Iterable[Mapping[str, object]], rows_per_group: int = ROWS_PER_GROUP
) -> Path:
    """Write rows to `file` with one of pyarrow's schemas and return it; an interrupted file is not left behind.

    `rows_per_group` rows are in memory at once. Equal rows give equal bytes.
    """
    left = iter(rows)
    with atomic_file(file) as partial, pq.ParquetWriter(partial, schema) as writer:
        while group := list(islice(left, rows_per_group)):
            writer.write_table(pa.Table.from_pylist(group, schema=schema))
    return file


def image_cell(encoded: bytes) -> dict[str, object]:
    """An encoded image as a cell of `IMAGE_TYPE`."""
    return {"bytes": encoded, "path": None}


def png_cell(image: Image.Image | NDArray[np.uint8]) -> dict[str, object]:
    """A picture, or its RGB values [height, width, 3], as a PNG in a cell of `IMAGE_TYPE`."""
    png = io.BytesIO()
    (Image.fromarray(image) if isinstance(image, np.ndarray) else image).save(png, "PNG")
    return image_cell(png.getvalue())
