"""The rows of the three splits of a data set in files."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np

from fovea.config.splits import SplitFiles
from fovea.data.cells import image_refs
from fovea.data.images import is_url, no_such_image
from fovea.data.rows import Rows
from fovea.environments.base import Split
from fovea.errors import BadRowError, DataError
from fovea.types import ImageRef

HELD_OUT_SEED = 0
"""Seed of what is held out, apart from the run's: runs with other seeds have the same rows there."""
_HASH_BYTES = 12


class Sides(NamedTuple):
    """Row numbers of a data set in two parts that share no image."""

    kept: list[int]
    """In the order of the data set."""
    held_out: list[int]
    """In the order of their hashes, so that the first few are a sample of all."""


def split_by_image(images: Iterable[Sequence[bytes]], *, share: float, seed: int) -> Sides:
    """Hold out about `share` of the rows, given the hashes of each row's images.

    Rows that share an image, directly or through other rows, form a group; a row without images is a separate group.
    Whole groups are taken in the order of their seeded hashes, those that still fit into the share; if none fits, the
    smallest one. Nothing is held out of a single group. Rows that are added later do not change the order of the
    groups that were there.
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
            refs = image_refs(*cells, where=rows.where(index), folder=rows.folder(index))
        except BadRowError:  # it is counted when a split comes to it
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
    """Rows by group, connected through shared images (union-find over row numbers)."""
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
    """A hash of the group's images; of its row number for a row without images."""
    own = min((each for row in group for each in hashes_of_rows[row]), default=b"row %d" % group[0])
    return hashlib.blake2b(own, digest_size=_HASH_BYTES, key=b"%d" % seed).digest()


OpenSplit: TypeAlias = Callable[[Split, Sequence[str]], Rows]
"""A function that opens the sources of a split, which the setting `environment.<split>_files` named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRows:
    """The rows of a split: some of the rows of its files."""

    rows: Rows
    indices: Sequence[int]


class FileSplits:
    """Opens each split at its first use. Dev and test rows are of their own files, else shares of the training rows.

    Test rows are held out first, dev rows of what is left.
    """

    def __init__(
        self,
        settings: SplitFiles,
        open_split: OpenSplit,
        image_columns: Callable[[Rows], Sequence[str]],
    ) -> None:
        """`image_columns` are those of the training rows that may hold images."""
        self._settings = settings
        self._open_split = open_split
        self._image_columns = image_columns

    def of(self, split: Split) -> SplitRows:
        """The rows of a split; DataError where some are to be held out and all training rows share an image."""
        files = {"train": None, "dev": self._settings.dev_files, "test": self._settings.test_files}[split]
        if files is not None:
            rows = self._opened_dev if split == "dev" else self._opened_test
            return SplitRows(rows=rows, indices=range(len(rows)))
        indices = {"train": lambda: self._dev_sides.kept, "dev": self._dev, "test": self._test}[split]()
        return SplitRows(rows=self._train, indices=indices)

    @cached_property
    def _train(self) -> Rows:
        return self._open_split("train", self._settings.train_files)

    @cached_property
    def _opened_dev(self) -> Rows:
        return self._open_split("dev", self._settings.dev_files or ())

    @cached_property
    def _opened_test(self) -> Rows:
        return self._open_split("test", self._settings.test_files or ())

    def _dev(self) -> Sequence[int]:
        return self._checked("dev", self._settings.dev_share, self._dev_sides.held_out)

    def _test(self) -> Sequence[int]:
        return self._checked("test", self._settings.test_share, self._test_sides.held_out)

    def _checked(self, split: Split, share: float, held_out: Sequence[int]) -> Sequence[int]:
        if share > 0 and not held_out:
            raise DataError(
                f"environment.{split}_share={share:g}, but {self._why_none()}, so that none can be held out by image; "
                f"set environment.{split}_files, or environment.{split}_share=0"
            )
        return held_out

    def _why_none(self) -> str:
        """Why no training row can be held out; BadRowError where they share an image whose file is missing."""
        rows = self._train
        if len(rows) == 1:
            return "there is a single training row"
        for name in self._image_columns(rows):
            for ref in image_refs(next(iter(rows.column(name))), where=rows.where(0), folder=rows.folder(0)):
                if isinstance(ref.source, str) and not is_url(ref.source) and not Path(ref.source).exists():
                    raise no_such_image(f"{ref.where} ({ref.source[:200]})")
        return f"the {len(rows)} training rows, or those that are left of them, share one image"

    @cached_property
    def _test_sides(self) -> Sides:
        share = 0.0 if self._settings.test_files is not None else self._settings.test_share
        return self._split(range(len(self._train)), share)

    @cached_property
    def _dev_sides(self) -> Sides:
        share = 0.0 if self._settings.dev_files is not None else self._settings.dev_share
        return self._split(self._test_sides.kept, share)

    def _split(self, rows: Sequence[int], share: float) -> Sides:
        """Hold out a share of these training rows."""
        # nothing is read where nothing is held out
        hashes = [self._hashes[row] for row in rows] if share > 0 else [()] * len(rows)
        sides = split_by_image(hashes, share=share, seed=HELD_OUT_SEED)
        return Sides([rows[place] for place in sides.kept], [rows[place] for place in sides.held_out])

    @cached_property
    def _hashes(self) -> Sequence[tuple[bytes, ...]]:
        columns = self._image_columns(self._train)
        return list(image_hashes(self._train, columns)) if columns else [()] * len(self._train)
