"""The rows of the three splits of a data set in files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from fovea.config.splits import SplitFiles
from fovea.data.held_out import Sides, image_hashes, split_by_image
from fovea.data.rows import Rows, Source
from fovea.environments.base import Split
from fovea.errors import DataError

Frames: TypeAlias = Mapping[Split, Source]
"""Rows of the splits that the user's own code hands in, mostly in memory already."""
OpenSplit: TypeAlias = Callable[[Split, Sequence[Source]], Rows]
"""A function that opens the sources of a split, which the setting `environment.<split>_files` named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRows:
    """The rows of a split: some of the rows of its files."""

    rows: Rows
    indices: Sequence[int]


class FileSplits:
    """Opens each split at its first use. Dev rows are of `dev_files`, else a share of the training rows."""

    def __init__(
        self,
        settings: SplitFiles,
        open_split: OpenSplit,
        image_columns: Callable[[Rows], Sequence[str]],
        frames: Frames | None = None,
    ) -> None:
        """`frames` replaces the files that the settings name for a split. `image_columns` may hold images."""
        self._settings = settings
        self._open_split = open_split
        self._image_columns = image_columns
        self._frames = frames or {}

    def of(self, split: Split) -> SplitRows:
        """The rows of a split; DataError where dev is to be held out and all training rows share an image."""
        if split == "test":
            return SplitRows(rows=self._test, indices=range(len(self._test)))
        if self._has_dev_source:
            rows = self._train if split == "train" else self._dev
            return SplitRows(rows=rows, indices=range(len(rows)))
        return SplitRows(rows=self._train, indices=self._sides.kept if split == "train" else self._held_out())

    @property
    def _has_dev_source(self) -> bool:
        return "dev" in self._frames or self._settings.dev_files is not None

    @cached_property
    def _train(self) -> Rows:
        return self._open("train", self._settings.train_files)

    @cached_property
    def _dev(self) -> Rows:
        return self._open("dev", self._settings.dev_files or ())

    @cached_property
    def _test(self) -> Rows:
        return self._open("test", self._settings.test_files)

    def _open(self, split: Split, files: Sequence[str]) -> Rows:
        return self._open_split(split, [self._frames[split]] if split in self._frames else files)

    def _held_out(self) -> list[int]:
        share = self._settings.dev_share
        if share > 0 and not self._sides.held_out:
            raise DataError(
                f"environment.dev_share={share:g}, but the training rows are a single row, or share one image, so that "
                "none can be held out by image; set environment.dev_files, or environment.dev_share=0"
            )
        return self._sides.held_out

    @cached_property
    def _sides(self) -> Sides:
        rows, share = self._train, self._settings.dev_share
        columns = self._image_columns(rows)
        # nothing is read where nothing is held out
        hashes = image_hashes(rows, columns) if columns and share > 0 else [()] * len(rows)
        return split_by_image(hashes, share=share, seed=self._settings.dev_seed)
