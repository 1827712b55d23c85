"""The run folder: it is locked by the process that writes into it, and checked to belong to its run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from fovea.config.describe import describe
from fovea.config.loading import config_of, dump_config, package_parts
from fovea.config.recipes import read_yaml
from fovea.config.run import Config
from fovea.report.about import CONFIG_FILE, read_config
from fovea.run.checkpoint import Checkpoints, is_checkpoint
from fovea.run.lock import locked
from fovea.run.run_dir import (
    delete_unless_begun,
    has_a_time,
    has_checkpoint,
    has_taken_no_step,
    make_folder,
    newest_step,
)
from fovea_gym.errors import ConfigError, DataError, ScoreError
from fovea_gym.settings.base import Tree, leaves
from fovea_gym.settings.rewards import FROM_PYTHON
from fovea_gym.settings.splits import ROWS_FOLDER, RUN_DIR
from fovea_gym.utils.bounded import check_tree
from fovea_gym.utils.files import write_atomically

ERRORS_OF_THE_USER = (ConfigError, DataError, ScoreError)
"""Errors in settings, rows or a reward, after which the user corrects something and starts the run again."""

OF_TRACKERS = ("wandb", "swanlog", "mlruns")
"""Folders that trackers write, W&B with links into its cache; nothing in them is read."""


@contextmanager
def open_run_folder(config: Config) -> Iterator[Config]:
    """Make the folder of `run_dir`, hold its lock and write the settings; ConfigError if it holds another run.

    Yields the settings with the pattern in `run_dir` filled in. The folder is deleted if the start fails before its
    first checkpoint, or with one of ERRORS_OF_THE_USER in the first step, unless there was a warm-up.
    """
    with ExitStack() as held:
        try:
            folder, is_new = make_folder(config)
            config = config.model_copy(update={"run_dir": str(folder)})
            held.enter_context(locked(folder))
            if is_new:
                held.push(partial(_delete_after, folder, config))
            check_tree(folder, OF_TRACKERS)
            check_run(folder, config)
            write_atomically(folder / CONFIG_FILE, dump_config(config).encode())
        except OSError as error:
            raise ConfigError(
                f"run_dir={config.run_dir} cannot be written: {error.strerror}; set another run_dir"
            ) from error
        yield config


def _delete_after(folder: Path, config: Config, _type: object, error: BaseException | None, _traceback: object) -> None:
    """Delete the folder that a run has made, if a new start can reproduce it; keep folders named by a time."""
    may_go = isinstance(error, ERRORS_OF_THE_USER) and config.warmup is None and not has_a_time(folder)
    delete_unless_begun(folder, start_is_worth_keeping=not may_go)


def check_run(folder: Path, config: Config) -> None:
    """ConfigError if the folder holds a run other than the one to resume."""
    checkpoint = config.resume_from
    run = folder if checkpoint is None else run_of(checkpoint)
    if has_checkpoint(folder) and (config.resume == "never" or run.resolve() != folder.resolve()):
        fix = "it has taken no step: after correcting code or rows, add resume_changed=allow, or delete the folder"
        raise ConfigError(
            f"run_dir={folder} already holds a run; set resume=auto to continue it, or set another run_dir"
            f"{f'; {fix}' if has_taken_no_step(folder) else ''}"
        )
    if not has_checkpoint(run):
        return
    saved = run / CONFIG_FILE
    if not saved.exists():
        raise ConfigError(f"{run} holds checkpoints but no {CONFIG_FILE} with their settings; set another run_dir")
    _check_same(saved, config)
    step = newest_step(run) if checkpoint is None else int(checkpoint.resolve().name.removeprefix("step-"))
    if step > config.max_steps:
        raise ConfigError(
            f"max_steps={config.max_steps}, but the run in {run} has taken {step} steps, so nothing is left to train; "
            "set a larger max_steps, or use it as it is (fovea eval, fovea export)"
        )


def run_of(checkpoint: Path) -> Path:
    """The run folder of a checkpoint; ConfigError if there is no such checkpoint."""
    if not is_checkpoint(checkpoint):
        newest = Checkpoints(checkpoint, keep=1).newest
        fix = f"set resume={newest}" if newest else "set it to never, to auto, or to the folder of a checkpoint"
        raise ConfigError(f"resume={checkpoint} is not a checkpoint, such as runs/x/checkpoints/step-100; {fix}")
    # resolved, since the path as given may have other parents, as `runs/x/checkpoints/step-4/.` does
    return checkpoint.resolve().parents[1]


def _check_same(saved: Path, config: Config) -> None:
    try:
        tree = read_yaml(read_config(saved.parent), str(saved))
    except (ConfigError, DataError):
        tree = None
    if not isinstance(tree, dict):
        raise ConfigError(f"{saved} cannot be read, so its run cannot be resumed; set another run_dir")
    # logging settings may change, and the tracker may be from another package, which loading would import
    tree.pop("log", None)
    _check_packages(saved, tree, config)
    began = config_of(tree, str(saved))
    before = _fixed_settings(read_yaml(dump_config(began), str(saved)))
    now = _fixed_settings(read_yaml(dump_config(config), "the settings"))
    # names first, since a changed name also changes the settings below it
    for key in sorted(before.keys() | now.keys(), key=lambda key: (not key.endswith(".name"), key.count("."), key)):
        if before.get(key) != now.get(key):
            if _are_given(before.get(key)) and _are_given(now.get(key)):
                raise ConfigError(
                    f"the given rows (rows, dev_rows or test_rows) are not those that the run in {saved.parent} began "
                    "with; give the same rows to resume, or start over in another run_dir"
                )
            raise ConfigError(
                f"{key}={now.get(key)}, but the run in {saved.parent} began with {before.get(key)}; "
                f"{_set_back(key, before.get(key), saved)} to resume, or start over in another run_dir"
            )


def _check_packages(saved: Path, tree: Tree, config: Config) -> None:
    """ConfigError for a part of another package that only the folder names: loading its settings would import it."""
    for key, name in sorted(package_parts(tree) - package_parts(config.model_dump())):
        raise ConfigError(
            f"the run in {saved.parent} began with {key}={name}, a part of another package, and these settings choose "
            f"another; set {key}={name} to resume, or start over in another run_dir"
        )


def _are_given(files: object) -> bool:
    """True if these are files of rows that Python code gave and the run folder keeps."""
    return isinstance(files, list) and any(str(file).startswith(f"{RUN_DIR}/{ROWS_FOLDER}/") for file in files)


def _set_back(key: str, value: object, saved: Path) -> str:
    given = value if isinstance(value, list) else [value]
    if any(str(each).startswith(FROM_PYTHON) for each in given):
        argument = key.partition(".")[0]
        return f"give that object again from Python, fovea.GRPO(recipe='{saved}', {argument}=..., resume='auto'),"
    return "set it back"


def _fixed_settings(tree: dict[str, object]) -> dict[str, object]:
    """Settings by dotted key, without those that may change on resume."""
    may_change = {setting.key for setting in describe() if setting.may_change}
    return {key: value for key, value in leaves(tree).items() if key not in may_change}
