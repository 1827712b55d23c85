"""Rows that Python code has given, written to a Parquet file: a run reads what its folder keeps.

Images stay as they are where they are encoded, or at a path or URL; Pillow's pictures and arrays are written without
loss. Paths become absolute ones, from the working directory on.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from fovea.data.cells import image_refs
from fovea.data.images import is_url
from fovea.data.readers.base import listed
from fovea.data.rows import Rows
from fovea.data.writing import IMAGE_TYPE, image_cell, write_rows
from fovea.errors import BadRowError, DataError
from fovea.types import ImageRef

_NO_IMAGE: dict[str, object] = {"bytes": None, "path": ""}
"""The cell of what is not an image, in a row that is a bad one when it is read."""
ROWS_PER_GROUP = 50
"""Few, since a photo has megabytes, and a group is read as a whole."""
_DIGITS = 12
"""Digits of a checksum that are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenRows:
    """Rows in memory, with the argument that gave them and the columns of their images."""

    rows: Rows
    argument: str
    image_columns: Sequence[str]
    image_root: str | None = None
    """Folder that paths are relative to; None: the working directory."""
    skip_bad: bool = False
    """Write what is not an image as a bad row; False: an error."""
    paths: list[str] = field(default_factory=list, init=False)
    """Paths of the images that are files of this machine, once they are written."""
    without_picture: list[int] = field(default_factory=list, init=False)
    """Places of the rows whose columns of images are all empty, once they are written."""

    def write(self, file: Path) -> None:
        """Write all rows; DataError, by argument, row and column, for a cell that no file can hold."""
        types = {name: self._type_of(name) for name in self.rows.columns}
        write_rows(file, pa.schema(list(types.items())), self._cells(types), ROWS_PER_GROUP)

    @property
    def remark(self) -> str | None:
        """Remark on the rows that were written, or None."""
        if not self.without_picture:
            return None
        num_rows, columns = len(self.without_picture), listed(self.image_columns)
        return (
            f"{self.argument}: {num_rows} of {len(self.rows)} rows have no picture in {columns} "
            f"({'row' if num_rows == 1 else 'rows'} {listed([str(row) for row in self.without_picture], 5)}), and are "
            "asked without one; leave them out where a picture is missing"
        )

    def _type_of(self, name: str) -> Any:
        values = list(self.rows.column(name))
        if name in self.image_columns:
            is_list = any(isinstance(value, list | tuple) for value in map(_unpacked, values))
            return pa.list_(IMAGE_TYPE) if is_list else IMAGE_TYPE
        try:
            kind = pa.array(values).type
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise self._unfit(name, values, error) from error
        if _has_empty_mapping(kind):
            raise DataError(
                f"{self.argument}, column {name}: a mapping that is empty in every row cannot be kept in a file; leave "
                "it out, or write None"
            )
        return kind

    def _unfit(self, name: str, values: Sequence[object], error: Exception) -> DataError:
        """The error of a column that Arrow has no type for: the row that does not fit, and the fix."""
        for row, value in enumerate(values):
            try:
                pa.array([value])
            except (pa.ArrowException, TypeError, ValueError, OverflowError):
                fix = "make it text, a number, a list or a mapping of these, or leave the column out"
                if isinstance(value, Image.Image):
                    fix = f"if the column holds images, set environment.image_key={name}"
                kind = (
                    "a text with half a character"
                    if isinstance(value, str)
                    else f"a value of type {type(value).__name__}"
                )
                seen = f"{kind} cannot be kept in a file"
                return DataError(f"{self.rows.where(row)}, column {name}: {seen}; {fix}")
        kinds: dict[str, int] = {}
        for row, value in enumerate(values):
            if value is not None:
                kinds.setdefault(type(value).__name__, row)
        seen = listed([f"{kind} (row {row})" for kind, row in kinds.items()]) if len(kinds) > 1 else str(error)
        return DataError(f"{self.argument}, column {name} holds {seen}; make all of its values one type, such as text")

    def _cells(self, types: dict[str, Any]) -> Iterator[dict[str, object]]:
        for index, row in enumerate(self.rows):
            where = self.rows.where(index)
            images = {name: self._images(row.get(name), where, types[name]) for name in self.image_columns}
            if images and not any(images.values()):
                self.without_picture.append(index)
            yield {**row, **images}

    def _images(self, cell: object, where: str, type_of_column: Any) -> object:
        if cell is None:
            return None
        try:
            refs = image_refs(cell, where=where, folder=self.image_root)
            cells = [self._image(ref) for ref in refs]
        except BadRowError:
            if not self.skip_bad:
                raise
            cells = [_NO_IMAGE]
        return cells if type_of_column != IMAGE_TYPE else cells[0]

    def _image(self, ref: ImageRef) -> dict[str, object]:
        source = ref.source
        if isinstance(source, bytes):
            return image_cell(source)
        if isinstance(source, str):
            if not is_url(source):
                self.paths.append(source)
            return {"bytes": None, "path": source}
        if isinstance(source, np.ndarray):
            if source.dtype != np.uint8 or source.ndim != 3 or source.shape[2] != 3:
                problem = f"an array of {source.dtype} with shape {list(source.shape)} is not an RGB picture"
                fix = "give uint8 values of shape [height, width, 3], or set data.on_bad_row=skip"
                raise BadRowError(f"{ref.where}: {problem}; {fix}", "image_kind")
            source = Image.fromarray(source)
        return image_cell(_encoded(source, ref.where))


def _has_empty_mapping(kind: Any) -> bool:
    """True if one of Arrow's types is, or has inside, a struct without fields, which Parquet does not know."""
    inner = [kind.field(index).type for index in range(kind.num_fields)]
    return (pa.types.is_struct(kind) and not inner) or any(map(_has_empty_mapping, inner))


def _unpacked(cell: object) -> object:
    return cell.tolist() if isinstance(cell, np.ndarray) and cell.dtype == object else cell


def _encoded(image: Image.Image, where: str) -> bytes:
    """The picture without loss, with its frames and the note (EXIF) on how it is turned."""
    # PNG has no colours for printing and no floats, TIFF has; only the first frame would hide that there are more
    frames = image.format != "MPO" and getattr(image, "n_frames", 1) > 1
    for form in ("PNG", "TIFF"):
        encoded = io.BytesIO()
        try:
            image.save(encoded, form, save_all=frames, exif=image.getexif())
        except (OSError, ValueError, SyntaxError) as error:
            problem = f"{where}: the picture cannot be stored ({error})"
            continue
        return encoded.getvalue()
    raise BadRowError(f"{problem}; give its encoded bytes or its path, or set data.on_bad_row=skip", "image_damaged")


def digest_of(file: Path) -> str:
    """A checksum of the rows of a Parquet file, whichever version of pyarrow has written it."""
    digest = hashlib.sha256()
    with pq.ParquetFile(file) as table:
        for batch in table.iter_batches(batch_size=100):
            digest.update(batch.serialize())
    return digest.hexdigest()[:_DIGITS]


def common_folder(paths: Sequence[str]) -> str:
    """The deepest folder that holds all of the files."""
    return os.path.commonpath([os.path.dirname(path) for path in paths])
