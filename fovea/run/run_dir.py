"""The folder of a run: its name, which is fixed or a pattern that is new for each run, and the link `latest`."""

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
    """Make the folder of a run; returns it, and True if it is new. ConfigError if resume=auto, but the name is new."""
    if TIME not in config.run_dir:
        folder = Path(filled(config))
        if folder.is_symlink():
            folder = folder.resolve()  # during this run, a later one may point `latest` at its own folder
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
        # created without checking first, since another run may begin in the same second
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder, True
    raise AssertionError("candidates never end")


def filled(config: Config, time: str = TIME) -> str:
    """`run_dir` with its placeholders replaced by the name of the environment and a time."""
    return config.run_dir.replace(NAME, config.environment.name).replace(TIME, time)


def delete_unless_begun(folder: Path, *, start_is_worth_keeping: bool = True) -> None:
    """Delete the folder of a run that has ended before its first checkpoint.

    With `start_is_worth_keeping` false, also before its first step: a new start can reproduce the checkpoint of step 0.
    """
    has_begun = has_checkpoint(folder) and (start_is_worth_keeping or not has_taken_no_step(folder))
    # lists of bad or unscored rows are kept, since messages refer to them
    lists = set(folder.glob("*.jsonl")) - {folder / METRICS_FILE}
    # the micro-batch size for the next attempt is kept too: memory may run out before the first checkpoint
    if not has_begun and not lists and not (folder / MICROBATCHES_FILE).exists():
        # a failed deletion must not replace the error that ended the run
        shutil.rmtree(folder, ignore_errors=True)


def has_taken_no_step(folder: Path) -> bool:
    """True if the run in a folder has only the checkpoint of step 0, and no metrics of a step."""
    metrics = folder / METRICS_FILE
    return newest_step(folder) == 0 and not (metrics.exists() and metrics.stat().st_size)


def has_checkpoint(folder: Path) -> bool:
    """True if the folder holds a checkpoint; before the first one, settings may change freely."""
    return any(map(holds_files, folder.glob("checkpoints/step-*")))


def checkpoint_folders(folder: Path) -> list[Path]:
    """Folders of a run's checkpoints, damaged or not, oldest first; ignores other names and empty folders."""
    found = (path for path in folder.glob("checkpoints/step-*") if path.name.removeprefix("step-").isdecimal())
    return sorted(filter(holds_files, found), key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step in the name of a checkpoint's folder."""
    return int(checkpoint.name.removeprefix("step-"))


def holds_files(folder: Path) -> bool:
    """True if a path is a folder with something in it."""
    return folder.is_dir() and any(folder.iterdir())


def newest_step(folder: Path) -> int:
    """The step of the newest checkpoint of a run, damaged or not; -1 before the first one."""
    return max(map(step_of, checkpoint_folders(folder)), default=-1)


def has_a_time(folder: Path) -> bool:
    """True if the name of a folder ends in a time: then it belongs to one run, and `latest` may point to it."""
    return _ENDS_IN_TIME.search(folder.name) is not None


def link_latest(folder: Path) -> None:
    """Point the link `latest`, next to the folder, to it if its name ends in a time; otherwise do nothing."""
    folder = folder.resolve()
    link = folder.with_name(LATEST)
    if not has_a_time(folder) or (link.exists() and not link.is_symlink()):
        return
    with suppress(OSError):  # the file system may not support links
        new = link.with_name(f".{uuid4().hex}.partial")
        new.symlink_to(folder.name)
        os.replace(new, link)
