"""The folder of a run: made once, never mixed up with another run."""

from __future__ import annotations

from pathlib import Path

import yaml

from fovea.config import Config
from fovea.config_io import dump_config
from fovea.errors import ConfigError

CONFIG_FILE = "config.yaml"
MAY_CHANGE = ("run_dir", "max_steps", "resume", "threads", "log", "checkpoint", "evaluate")
"""Settings that a resumed run may have other than it began with."""


def open_run_folder(folder: Path, config: Config) -> Path:
    """Make the folder and write the resolved settings; ConfigError when it holds another run.

    A folder holds a run from its first checkpoint on: a start that failed before may be tried again.
    """
    saved = folder / CONFIG_FILE
    if any(folder.glob("checkpoints/step-*")):
        if config.resume == "never":
            raise ConfigError(
                f"run_dir={folder} already holds a run; set resume=auto to go on with it, or another run_dir"
            )
        if not saved.exists():
            raise ConfigError(
                f"run_dir={folder} holds checkpoints but no {CONFIG_FILE} that says of which run; set another run_dir"
            )
        _check_same(saved, config)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        saved.write_text(dump_config(config), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"run_dir={folder} cannot be written: {error.strerror}; set another run_dir") from error
    return folder


def _check_same(saved: Path, config: Config) -> None:
    before = _fixed_settings(yaml.safe_load(saved.read_text(encoding="utf-8")))
    now = _fixed_settings(yaml.safe_load(dump_config(config)))
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key):
            raise ConfigError(
                f"{key}={now.get(key)}, but the run in {saved.parent} began with {before.get(key)}; set it back "
                "to resume, or start anew in another run_dir"
            )


def _fixed_settings(tree: dict[str, object], prefix: str = "") -> dict[str, object]:
    """Leaves by dotted key, without those that may change."""
    leaves: dict[str, object] = {}
    for key, value in tree.items():
        if not prefix and key in MAY_CHANGE:
            continue
        if isinstance(value, dict):
            leaves |= _fixed_settings(value, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves
