"""The interpreter of `rollout.engine.python`, and the environment variables of its processes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch

import fovea
from fovea.config.run import Config
from fovea_gym.errors import ConfigError


def set_threads(config: Config) -> None:
    """Set torch's number of threads from the settings."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)


def find_interpreter(setting: str) -> str:
    """Absolute path of the interpreter, which is a link in its environment; ConfigError if there is none."""
    here = f"rollout.engine.python={setting}"
    found = shutil.which(os.path.expanduser(setting))
    if found is None:
        raise ConfigError(
            f"{here}: no such interpreter; give the path in the environment with the engine, such as ENV/bin/python"
        )
    # the link is not resolved, since its target is outside the environment
    return os.path.abspath(found)


def absolute(setting: str) -> str:
    """The setting for processes with another working directory; a bare name is left for them to find on their PATH."""
    return os.path.abspath(os.path.expanduser(setting)) if os.sep in setting else setting


def variables_of(interpreter: str) -> dict[str, str | None]:
    """Environment variables (None: removed) with which another interpreter imports nothing from this environment."""
    # the other environment may use this checkout of Fovea, but no folder of this environment's packages
    checkout = Path(fovea.__file__).parents[1]
    return {
        "PATH": f"{os.path.dirname(interpreter)}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "PYTHONPATH": str(checkout) if (checkout / "pyproject.toml").is_file() else None,
        "PYTHONSAFEPATH": "1",
        "PYTHONHOME": None,
        "VIRTUAL_ENV": None,
    }
