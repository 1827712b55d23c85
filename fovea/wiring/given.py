"""Objects that Python code gives in place of settings: rows in memory, a reward function, an environment."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeAlias, get_args

from fovea.config.base import variants_of
from fovea.config.environments import FileEnvironment, RowsEnvironment
from fovea.config.run import Config
from fovea.config.splits import ROWS_FOLDER, RUN_DIR, SplitFiles
from fovea.data.given_rows import GivenRows, common_folder, digest_of
from fovea.data.readers.base import check_named, listed, nearest
from fovea.data.rows import InMemory, Rows, given_rows
from fovea.environments.base import Split
from fovea.environments.dataset_tasks import check_answer, check_question
from fovea.errors import ConfigError, DataError
from fovea.utils.files import atomic_file

ARGUMENTS: Mapping[Split, str] = {"train": "rows", "dev": "dev_rows", "test": "test_rows"}
"""Arguments that give the rows of a split to a trainer."""
Frames: TypeAlias = Mapping[Split, InMemory]
"""Rows in memory by split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenRows:
    """Settings that name the files of given rows, and where these files are until the run has a folder."""

    config: Config
    files: Mapping[str, Path] = field(default_factory=dict)
    """By the name in the folder of rows."""
    remarks: Sequence[str] = ()
    """Remarks on the rows, printed before they are used."""

    def move_into(self, folder: Path) -> None:
        """Move the files into a run folder, where it does not have them yet."""
        for name, file in self.files.items():
            target = folder / ROWS_FOLDER / name
            if not target.exists():
                with atomic_file(target) as partial:
                    shutil.move(file, partial)


@contextmanager
def rows_as_files(
    config: Config, frames: Frames | None, arguments: Mapping[Split, str] = ARGUMENTS
) -> Iterator[WrittenRows]:
    """Write given rows to files and name these in the settings, in place of the files that were named there.

    `arguments` are the names of those that gave the rows of a split, for errors.
    A file is named after its rows, so that settings are equal where rows are. It exists until the block ends, or is
    moved. Paths of images must not lead out of `data.image_root`; it is set to what holds them all where it is not set.
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
            files[name], changes[f"{split}_files"] = file, (f"{RUN_DIR}/{ROWS_FOLDER}/{name}",)
            paths += given.paths
            if given.remark and isinstance(settings, FileEnvironment):  # in geospot they are bad rows
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
    """ConfigError for rows that are given to an environment whose section names no files; None is the default one."""
    sections = variants_of(Config.model_fields["environment"])
    name = environment or next(iter(sections))
    if name in sections and not issubclass(sections[name], SplitFiles):
        raise _takes_no_rows(name)


def _takes_no_rows(environment: str) -> ConfigError:
    return ConfigError(
        f"rows are given, but environment.name={environment} takes none; choose rows (with your own reward), vqa, "
        "geo3k, caption or geospot"
    )


def _given(config: Config, settings: SplitFiles, rows: Rows, argument: str) -> GivenRows:
    names, columns = settings.image_names, rows.columns
    check_named(columns, settings.named_columns, f"the argument {argument} has")
    if isinstance(settings, FileEnvironment):
        check_question(settings, columns, argument)
        # your own reward may do without, but a warm-up imitates the answers
        if not isinstance(settings, RowsEnvironment) or config.warmup is not None:
            check_answer(settings, columns, rows[0] if len(rows) else None, argument)
    present = [name for name in names if name in columns]
    if not settings.names_images and not present:
        raise DataError(
            f"{argument}: no column is called {' or '.join(names)}, so where are the pictures? The columns are "
            f"{listed(columns)}; set environment.image_key{nearest(names, columns)}, or environment.image_keys=[] for "
            "rows without pictures"
        )
    return GivenRows(
        rows=rows,
        argument=argument,
        image_columns=present,
        image_root=config.data.image_root,
        skip_bad=config.data.on_bad_row == "skip",
    )


def _with_image_root(config: Config, frames: Frames, paths: list[str]) -> Config:
    """The settings with a root for the paths of images in given rows; ConfigError where files would get it, too."""
    if config.data.image_root is not None or not paths:
        return config
    named = [f"{split}_files" for split in ARGUMENTS if split not in frames]
    files = next((key for key in named if getattr(config.environment, key)), None)
    if files is not None:
        raise ConfigError(
            f"rows hold paths of images, and environment.{files} names files, whose paths may start elsewhere; set "
            "data.image_root to the folder that holds all images"
        )
    root = {"image_root": common_folder(paths)}
    return config.model_copy(update={"data": config.data.model_copy(update=root)})
