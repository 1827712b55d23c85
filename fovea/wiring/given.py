"""Rows that Python code gives in place of data files; they are written to Parquet files of the run."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from fovea.config.run import Config
from fovea.data.bad_rows import with_skip
from fovea.wiring.images import SECTION
from fovea_gym.environments.base import Split
from fovea_gym.environments.dataset_tasks import check_answer, check_question
from fovea_gym.errors import BadRowError, ConfigError, DataError, first_line
from fovea_gym.rows.cells import image_refs
from fovea_gym.rows.images import is_url
from fovea_gym.rows.readers.base import check_named, listed, nearest
from fovea_gym.rows.rows import InMemory, Rows, given_rows
from fovea_gym.rows.writing import IMAGE_TYPE, image_cell, release_memory, write_rows
from fovea_gym.settings.base import variants_of
from fovea_gym.settings.environments import RowsEnvironment
from fovea_gym.settings.grounding import GroundingEnvironment
from fovea_gym.settings.splits import ROWS_FOLDER, RUN_DIR, FileEnvironment, SplitFiles
from fovea_gym.types import ImageRef
from fovea_gym.utils.files import atomic_file

_NO_IMAGE: dict[str, object] = {"bytes": None, "path": ""}
"""The cell written for a value that is not an image; its row counts as a bad row when it is read."""
ROWS_PER_GROUP = 50
"""Rows of a Parquet row group: few, since a photo has megabytes and a group is read as a whole."""
CONTAINERS = (Mapping, list, tuple, set, np.ndarray)
MOST_LEVELS = 32
"""Deepest nesting of lists and mappings that a cell may have."""
_DIGITS = 12
"""Hexadecimal digits of a checksum that are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenRows:
    """Rows in memory, with the name of the argument that gave them and their image columns.

    Encoded images, paths and URLs are written unchanged, except that paths become absolute; Pillow images and arrays
    are stored without loss.
    """

    rows: Rows
    argument: str
    image_columns: Sequence[str]
    image_root: str | None = None
    """Folder that paths are relative to; None: the working directory."""
    skip_bad: bool = False
    """True: write a value that is not an image as a bad row; False: raise an error."""
    paths: list[str] = field(default_factory=list, init=False)
    """Paths of images on this machine, filled while rows are written."""
    without_picture: list[int] = field(default_factory=list, init=False)
    """Indices of rows whose image columns are all empty, filled while rows are written."""

    def write(self, file: Path) -> None:
        """Write all rows; DataError, which names argument, row and column, for a cell that Parquet cannot hold."""
        types = {name: self._type_of(name) for name in self.rows.columns}
        write_rows(file, pa.schema(list(types.items())), self._cells(types), ROWS_PER_GROUP)

    @property
    def remark(self) -> str | None:
        """Remark on written rows that have no image, or None."""
        if not self.without_picture:
            return None
        num_rows, columns = len(self.without_picture), listed(self.image_columns)
        return (
            f"{self.argument}: {num_rows} of {len(self.rows)} rows have no picture in {columns} "
            f"({'row' if num_rows == 1 else 'rows'} {listed([str(row) for row in self.without_picture], 5)}), and are "
            "asked without one; remove them if a picture is missing"
        )

    def _type_of(self, name: str) -> Any:
        values = list(self.rows.column(name))
        if name in self.image_columns:
            unpacked = (
                cell.tolist() if isinstance(cell, np.ndarray) and cell.dtype == object else cell for cell in values
            )
            is_list = any(isinstance(cell, list | tuple) for cell in unpacked)
            return pa.list_(IMAGE_TYPE) if is_list else IMAGE_TYPE
        for row, value in enumerate(values):
            if _is_deep(value):
                raise DataError(
                    f"{self.rows.where(row)}, column {name}: a value that contains itself, or is nested more than "
                    f"{MOST_LEVELS} deep, cannot be kept in a file; write it as text, or leave the column out"
                )
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
        """The error for a column that Arrow has no type for, with the row that does not fit and the fix."""
        for row, value in enumerate(values):
            try:
                pa.array([value])
            except (pa.ArrowException, TypeError, ValueError, OverflowError):
                fix = "make it text, a number, a list or a mapping of these, or leave the column out"
                if isinstance(value, Image.Image):
                    fix = f"if the column holds images, set environment.image_key={name}"
                is_text = isinstance(value, str)
                kind = "a text with half a character" if is_text else f"a value of type {type(value).__name__}"
                return DataError(f"{self.rows.where(row)}, column {name}: {kind} cannot be kept in a file; {fix}")
        kinds: dict[str, int] = {}
        for row, value in enumerate(values):
            if value is not None:
                kinds.setdefault(type(value).__name__, row)
        several = len(kinds) > 1
        seen = listed([f"{kind} (row {row})" for kind, row in kinds.items()]) if several else first_line(error)
        held = f"holds {seen}" if several else f"has cells of no common type ({seen})"
        return DataError(f"{self.argument}, column {name} {held}; make all of its values one type, such as text")

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
            refs = image_refs(cell, where=where, folder=self.image_root, image_root=f"{SECTION}image_root")
            cells = [self._image(ref) for ref in refs]
        except BadRowError as error:
            if not self.skip_bad:
                raise with_skip(error) from error
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
                fix = "give uint8 values of shape [height, width, 3]"
                raise BadRowError(f"{ref.where}: {problem}", "image_kind", fix)
            source = Image.fromarray(source)
        return image_cell(_encoded(source, ref.where))


def _is_deep(cell: object) -> bool:
    """True if a cell is nested so deeply that Arrow would crash the process."""
    level: list[object] = [cell] if isinstance(cell, CONTAINERS) else []
    for _ in range(MOST_LEVELS):
        # each object once: a list may contain another list, or itself, several times
        level = list({id(each): each for outer in level for each in _inner(outer)}.values())
        if not level:
            return False
    return True


def _inner(cell: Any) -> Iterable[object]:
    """The values in a container that are containers themselves."""
    if isinstance(cell, np.ndarray):
        cell = cell.tolist() if cell.dtype == object else ()
    values = cell.values() if isinstance(cell, Mapping) else cell
    return [each for each in values if isinstance(each, CONTAINERS)] if isinstance(values, Iterable) else ()


def _has_empty_mapping(kind: Any) -> bool:
    """True if an Arrow type is or contains a struct without fields, which Parquet does not support."""
    inner = [kind.field(index).type for index in range(kind.num_fields)]
    return (pa.types.is_struct(kind) and not inner) or any(map(_has_empty_mapping, inner))


def _encoded(image: Image.Image, where: str) -> bytes:
    """Encode the image without loss, with all frames and its EXIF rotation."""
    # TIFF supports CMYK and floats, PNG does not; writing only the first frame would hide that there are more
    frames = image.format != "MPO" and getattr(image, "n_frames", 1) > 1
    for form in ("PNG", "TIFF"):
        encoded = io.BytesIO()
        try:
            image.save(encoded, form, save_all=frames, exif=image.getexif())
        except (OSError, ValueError, SyntaxError) as error:
            problem = f"{where}: the picture cannot be stored ({error})"
            continue
        return encoded.getvalue()
    raise BadRowError(problem, "image_damaged", "give its encoded bytes or its path")


def digest_of(file: Path) -> str:
    """A checksum of the rows of a Parquet file, independent of the pyarrow version that wrote it."""
    digest = hashlib.sha256()
    with pq.ParquetFile(file) as table:
        for batch in table.iter_batches(batch_size=100):
            digest.update(batch.serialize())
    return digest.hexdigest()[:_DIGITS]


ARGUMENTS: Mapping[Split, str] = {"train": "rows", "dev": "dev_rows", "test": "test_rows"}
"""Names of the arguments that give a trainer the rows of each split."""
Frames: TypeAlias = Mapping[Split, InMemory]
"""Rows in memory by split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenRows:
    """Settings that name the files of given rows, and the paths of these files until the run has a folder."""

    config: Config
    files: Mapping[str, Path] = field(default_factory=dict)
    """Temporary paths of the files, by their names in the folder of rows."""
    remarks: Sequence[str] = ()
    """Remarks on the rows, to print before the rows are used."""

    def move_into(self, folder: Path) -> None:
        """Move the files into a run folder, except those that it already has."""
        for name, file in self.files.items():
            target = folder / ROWS_FOLDER / name
            if not target.exists():
                with atomic_file(target) as partial:
                    shutil.move(file, partial)


@contextmanager
def rows_as_files(
    config: Config, frames: Frames | None, arguments: Mapping[Split, str] = ARGUMENTS
) -> Iterator[WrittenRows]:
    """Write given rows to files, and name these in the settings in place of the files that the settings named.

    `arguments` maps splits to the names of the arguments that gave their rows, for errors. A file is named by the
    checksum of its rows, so that equal rows give equal settings; it exists until it is moved or the block ends. Image
    paths must stay inside `data.image_root`, which is set to their common folder if it is not set.
    """
    if not frames:
        yield WrittenRows(config=config)
        return
    settings = _settings_of(config, frames)
    cache = Path(config.data.cache_dir).expanduser() / ROWS_FOLDER
    cache.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="given-", dir=cache) as scratch:
        files, changes, paths, remarks = dict[str, Path](), dict[str, tuple[str, ...]](), list[str](), list[str]()
        for split, frame in frames.items():
            given = _given(config, settings, given_rows(frame, arguments[split]), arguments[split])
            file = Path(scratch) / split
            given.write(file)
            name = f"{given.argument}-{digest_of(file)}.parquet"
            release_memory()
            files[name], changes[f"{split}_files"] = file, (f"{RUN_DIR}/{ROWS_FOLDER}/{name}",)
            paths += given.paths
            if given.remark and isinstance(settings, FileEnvironment):  # in geospot, rows without images are bad rows
                remarks.append(given.remark)
        config = config.model_copy(update={"environment": settings.model_copy(update=changes)})
        yield WrittenRows(config=_with_image_root(config, frames, paths), files=files, remarks=remarks)


def _settings_of(config: Config, frames: Frames) -> SplitFiles:
    unknown = [str(split) for split in frames if split not in get_args(Split)]
    if unknown:
        raise ConfigError(f"frames: no split is called {', '.join(unknown)}; name them {', '.join(get_args(Split))}")
    if not isinstance(config.environment, SplitFiles):
        raise _takes_no_rows(config.environment.name)
    return config.environment


def check_takes_rows(environment: str | None) -> None:
    """ConfigError for given rows if the environment's settings name no files; None means the default environment."""
    sections = variants_of(Config.model_fields["environment"])
    name = environment or next(iter(sections))
    if name in sections and not issubclass(sections[name], SplitFiles):
        raise _takes_no_rows(name)


def _takes_no_rows(environment: str) -> ConfigError:
    return ConfigError(
        f"rows are given, but environment.name={environment} takes none; choose rows (with your own reward), vqa, "
        "geo3k, caption, geospot or grounding"
    )


def _given(config: Config, settings: SplitFiles, rows: Rows, argument: str) -> GivenRows:
    if isinstance(settings, GroundingEnvironment):
        settings = settings.with_layout
    names, columns = settings.image_names, rows.columns
    named = [(f"environment.{key}", column) for key, column in settings.named_columns]
    check_named(columns, named, f"the argument {argument} has")
    if isinstance(settings, FileEnvironment):
        check_question(settings, columns, argument, "environment.")
        # a user's reward may not need answers, but a warm-up imitates them
        if not isinstance(settings, RowsEnvironment) or config.warmup is not None:
            check_answer(settings, columns, rows, argument, "environment.")
    present = [name for name in names if name in columns]
    if not settings.names_images and not present:
        raise DataError(
            f"{argument}: no column is called {' or '.join(names)}, so the images were not found; the columns are "
            f"{listed(columns)}; set environment.image_key{nearest(names, columns)}, or environment.image_keys=[] for "
            "rows without images"
        )
    return GivenRows(
        rows=rows,
        argument=argument,
        image_columns=present,
        image_root=config.data.image_root,
        skip_bad=config.data.on_bad_row == "skip",
    )


def _with_image_root(config: Config, frames: Frames, paths: list[str]) -> Config:
    """The settings with a root for image paths in given rows; ConfigError if it would also apply to data files."""
    if config.data.image_root is not None or not paths:
        return config
    named = [f"{split}_files" for split in ARGUMENTS if split not in frames]
    files = next((key for key in named if getattr(config.environment, key)), None)
    if files is not None:
        raise ConfigError(
            f"rows hold paths of images, and environment.{files} names files, whose paths may start elsewhere; set "
            "data.image_root to the folder that holds all images"
        )
    root = {"image_root": os.path.commonpath([os.path.dirname(path) for path in paths])}
    return config.model_copy(update={"data": config.data.model_copy(update=root)})
