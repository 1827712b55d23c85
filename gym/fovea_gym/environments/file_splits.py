"""Assigns the rows of data files to the splits train, dev and test."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np

from fovea_gym.environments.base import Split
from fovea_gym.errors import BadRowError, DataError
from fovea_gym.rows.access import RowAccess
from fovea_gym.rows.images import is_url, no_such_image
from fovea_gym.rows.rows import Rows, open_rows
from fovea_gym.rows.tasks import LazyTasks, RowPlace
from fovea_gym.settings.splits import SplitFiles
from fovea_gym.types import ImageRef, Task

HELD_OUT_SEED = 0
"""Seed for the choice of held-out rows, independent of the run's seed: all runs hold out the same rows."""
KIND = "all"
"""The kind of all tasks if no column holds kinds."""
_HASH_BYTES = 12
MakeTask: TypeAlias = Callable[[Rows, int, str], Task]
"""A function that makes a task from the rows, a row number and the row's kind."""


class Sides(NamedTuple):
    """Row numbers of a data set in two parts that share no image."""

    kept: list[int]
    """In the order of the data set."""
    held_out: list[int]
    """In the order of their hashes, so that the first few are a random sample of all."""


def split_by_image(images: Iterable[Sequence[bytes]], *, share: float, seed: int) -> Sides:
    """Hold out about `share` of the rows, given the hashes of each row's images.

    Rows that share an image, directly or through other rows, form a group; a row without images is a separate one.
    Groups are held out whole, in the order of their seeded hashes, as long as they fit into the share; if none fits,
    the smallest is. With a single group nothing is held out. Appended rows do not change the order of earlier groups.
    """
    hashes_of_rows = list(images)
    groups = _groups(hashes_of_rows)
    if share == 0 or len(groups) < 2:
        return Sides(list(range(len(hashes_of_rows))), [])
    ranked = sorted(groups, key=lambda group: _rank(group, hashes_of_rows, seed))
    wanted, taken = share * len(hashes_of_rows), list[int]()
    for group in ranked:
        if len(taken) + len(group) <= wanted:
            taken += group
    taken = taken or min(ranked, key=len)
    held_out = set(taken)
    return Sides([row for row in range(len(hashes_of_rows)) if row not in held_out], taken)


def image_hashes(rows: Rows, columns: Sequence[str]) -> Iterable[tuple[bytes, ...]]:
    """Hashes of the images in these columns, row by row; none for cells that hold no image."""
    for index, cells in enumerate(zip(*(rows.column(name) for name in columns), strict=True)):
        try:
            refs = rows.image_refs(index, *cells)
        except BadRowError:  # it is counted when the run reaches the row
            refs = ()
        yield tuple(map(_image_hash, refs))


def _image_hash(ref: ImageRef) -> bytes:
    source = ref.source
    if isinstance(source, str):
        content = source.encode("utf-8", "surrogatepass")
    elif isinstance(source, bytes):
        content = source
    else:
        pixels = np.asarray(source)
        content = repr(pixels.shape).encode() + pixels.tobytes()
    return hashlib.blake2b(content, digest_size=_HASH_BYTES).digest()


def _groups(hashes_of_rows: Sequence[Sequence[bytes]]) -> list[list[int]]:
    """Rows grouped by shared images (union-find over row numbers)."""
    parent = list(range(len(hashes_of_rows)))

    def root(row: int) -> int:
        while parent[row] != row:
            parent[row] = row = parent[parent[row]]
        return row

    first_row: dict[bytes, int] = {}
    for row, hashes in enumerate(hashes_of_rows):
        for each in hashes:
            parent[root(row)] = root(first_row.setdefault(each, row))
    groups = defaultdict[int, list[int]](list)
    for row in range(len(parent)):
        groups[root(row)].append(row)
    return list(groups.values())


def _rank(group: Sequence[int], hashes_of_rows: Sequence[Sequence[bytes]], seed: int) -> bytes:
    """A seeded hash of the group's images, or of the row number for a row without images."""
    own = min((each for row in group for each in hashes_of_rows[row]), default=b"row %d" % group[0])
    return hashlib.blake2b(own, digest_size=_HASH_BYTES, key=b"%d" % seed).digest()


class FileSplits:
    """Opens each split at its first use. Without files for dev or test, shares of the training rows are held out."""

    def __init__(
        self, settings: SplitFiles, access: RowAccess, check: Callable[[Rows, str], None] = lambda _rows, _setting: None
    ) -> None:
        """`check(rows, setting)` raises DataError for rows, named by that setting, that the environment cannot use."""
        self._settings = settings
        self._access = access
        self._check = check
        self._files = {"train": settings.train_files, "dev": settings.dev_files, "test": settings.test_files}
        self._opened: dict[Split, Rows] = {}

    def tasks(
        self, split: Split, make: MakeTask, *, kind_key: str | None = None, level_key: str | None = None
    ) -> LazyTasks:
        """The tasks of a split, with kinds and levels from the columns of these names.

        DataError if rows are to be held out and all of them share an image.
        """
        rows, numbers = self._rows(split)
        kinds, levels = _cells(rows, kind_key), _cells(rows, level_key)
        return LazyTasks(
            lambda index: make(rows, index, kinds[index] if kinds else KIND),
            numbers,
            kind_of=lambda index: kinds[index] if kinds else KIND,
            level_of=levels.__getitem__ if levels is not None else None,
            place_of=lambda index: RowPlace(rows.key(index), rows.where(index)),
        )

    def _rows(self, split: Split) -> tuple[Rows, Sequence[int]]:
        """The rows of the files that contain a split, and the numbers of the rows that belong to the split."""
        if split != "train" and self._files[split] is not None:
            rows = self._open(split)
            return rows, range(len(rows))
        numbers, share = self._numbers[split], self._share(split)
        if share > 0 and not numbers:
            section = self._access.section
            raise DataError(
                f"{section}{split}_share={share:g}, but {self._why_none()}, so none can be held out by image; "
                f"set {section}{split}_files, or {section}{split}_share=0"
            )
        return self._open("train"), numbers

    def _open(self, split: Split) -> Rows:
        if split not in self._opened:
            setting = f"{self._access.section}{split}_files"
            columns = [(f"{self._access.section}{key}", column) for key, column in self._settings.named_columns]
            rows = open_rows(self._files[split] or (), columns=columns, setting=setting, access=self._access)
            self._check(rows, setting)
            self._opened[split] = rows
        return self._opened[split]

    def _share(self, split: Split) -> float:
        if split == "train" or self._files[split] is not None:
            return 0.0
        return self._settings.dev_share if split == "dev" else self._settings.test_share

    @cached_property
    def _numbers(self) -> Mapping[Split, Sequence[int]]:
        """The numbers of the training rows in each split: test rows are held out first, then dev rows of the rest."""
        rows = self._open("train")
        columns = [name for name in self._settings.image_names if name in rows.columns]
        kept: Sequence[int] = range(len(rows))
        numbers: dict[Split, Sequence[int]] = {}
        hashes: Sequence[Sequence[bytes]] = [()] * len(rows)
        if columns and (self._share("test") > 0 or self._share("dev") > 0):  # otherwise no image is read
            hashes = list(image_hashes(rows, columns))
        for split in ("test", "dev"):
            of_kept = [hashes[row] for row in kept]
            sides = split_by_image(of_kept, share=self._share(split), seed=HELD_OUT_SEED)
            numbers[split] = [kept[place] for place in sides.held_out]
            kept = [kept[place] for place in sides.kept]
        return {**numbers, "train": kept}

    def _why_none(self) -> str:
        """The reason why no training row can be held out; BadRowError if they share an image whose file is missing."""
        rows = self._open("train")
        if len(rows) == 1:
            return "there is a single training row"
        for name in self._settings.image_names:
            for ref in rows.image_refs(0, next(iter(rows.column(name)))):
                if isinstance(ref.source, str) and not is_url(ref.source) and not Path(ref.source).exists():
                    raise no_such_image(f"{ref.where} ({ref.source[:200]})")
        return f"the {len(rows)} training rows, or the remaining ones, share one image"


def _cells(rows: Rows, key: str | None) -> list[str] | None:
    """The cells of a column as texts, `all` for empty cells; None without a column."""
    # metric names contain them: JSON may hold lone surrogates, which the files of a run cannot hold
    texts = None if key is None else (KIND if cell is None else str(cell) for cell in rows.column(key))
    return None if texts is None else [text.encode(errors="replace").decode() for text in texts]
