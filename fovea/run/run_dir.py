"""The name of a run's folder: fixed, or a pattern that gives every run its own; and the link to the latest."""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from datetime import datetime
from itertools import chain, count
from pathlib import Path
from uuid import uuid4

from fovea.config.run import NAME, TIME, Config
from fovea.metrics.jsonl import METRICS_FILE
from fovea.run.microbatches import MICROBATCHES_FILE
from fovea_gym.errors import ConfigError

LATEST = "latest"
_ENDS_IN_TIME = re.compile(r"-\d{8}-\d{6}(-\d+)?$")


def make_folder(config: Config) -> tuple[Path, bool]:
    """Make the folder of a run, and say whether it is new; ConfigError if a pattern with a time is to be resumed."""
    if TIME not in config.run_dir:
        folder = Path(filled(config))
        if folder.is_symlink():
            folder = folder.resolve()  # while this run goes on, a later one may let `latest` lead to its own folder
        is_new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        return folder, is_new
    if config.resume == "auto":
        raise ConfigError(
            f"resume=auto continues the run in run_dir, but run_dir={config.run_dir} is a new folder every time; set "
            f"run_dir to the folder of the run, such as runs/{LATEST}, or to a fixed name"
        )
    name = filled(config, datetime.now().strftime("%Y%m%d-%H%M%S"))
    for folder in map(Path, chain([name], (f"{name}-{number}" for number in count(2)))):
        # not first asked for: another run may begin in the same second
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder, True
    raise AssertionError("candidates never end")


def filled(config: Config, time: str = TIME) -> str:
    """`run_dir` with the name of the environment and a time in their places."""
    return config.run_dir.replace(NAME, config.environment.name).replace(TIME, time)


def delete_unless_begun(folder: Path, *, start_is_worth_keeping: bool = True) -> None:
    """Delete the folder of a run that has ended before its first checkpoint, or before its first step.

    The latter where `start_is_worth_keeping` is false: the checkpoint of step 0 then holds what is there without it.
    """
    has_begun = has_checkpoint(folder) and (start_is_worth_keeping or not has_taken_no_step(folder))
    # lists of what was wrong are kept: messages refer to them
    lists = set(folder.glob("*.jsonl")) - {folder / METRICS_FILE}
    # and so is the size of micro-batches for the next attempt: memory may run out before the first checkpoint
    if not has_begun and not lists and not (folder / MICROBATCHES_FILE).exists():
        # what cannot be deleted must not take the place of the error that ended the run
        shutil.rmtree(folder, ignore_errors=True)


def has_taken_no_step(folder: Path) -> bool:
    """True if the run in a folder has no checkpoint but that of step 0, and no metrics of a step."""
    metrics = folder / METRICS_FILE
    return newest_step(folder) == 0 and not (metrics.exists() and metrics.stat().st_size)


def has_checkpoint(folder: Path) -> bool:
    """True if the folder holds a run; until its first checkpoint, settings may change freely."""
    return any(map(holds_files, folder.glob("checkpoints/step-*")))


def checkpoint_folders(folder: Path) -> list[Path]:
    """The checkpoints of a run, damaged or not, oldest first; other names are the user's, an empty folder is none."""
    found = (path for path in folder.glob("checkpoints/step-*") if path.name.removeprefix("step-").isdecimal())
    return sorted(filter(holds_files, found), key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step in the name of a checkpoint's folder."""
    return int(checkpoint.name.removeprefix("step-"))


def holds_files(folder: Path) -> bool:
    """True if a path is a folder that is not empty."""
    return folder.is_dir() and any(folder.iterdir())


def newest_step(folder: Path) -> int:
    """The step of the newest checkpoint in a folder, damaged or not; -1 before the first."""
    return max(map(step_of, checkpoint_folders(folder)), default=-1)


def has_a_time(folder: Path) -> bool:
    """True if the name of a folder ends in a time, so that it is one run's own and `latest` may lead to it."""
    return _ENDS_IN_TIME.search(folder.name) is not None


def link_latest(folder: Path) -> None:
    """Let `latest` beside a folder whose name ends in a time lead to it; other folders are left alone."""
    folder = folder.resolve()
    link = folder.with_name(LATEST)
    if not has_a_time(folder) or (link.exists() and not link.is_symlink()):
        return
    with suppress(OSError):  # a file system without links
        new = link.with_name(f".{uuid4().hex}.partial")
        new.symlink_to(folder.name)
        os.replace(new, link)
