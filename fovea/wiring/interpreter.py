"""The interpreter of `rollout.engine.python`, and the variables of a process of its environment."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch

import fovea
from fovea.config.run import Config
from fovea_gym.errors import ConfigError


def set_threads(config: Config) -> None:
    """Set the number of threads that the settings give torch."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)


def find_interpreter(setting: str) -> str:
    """Absolute path of the interpreter, which is a link of its environment; ConfigError where there is none."""
    here = f"rollout.engine.python={setting}"
    found = shutil.which(os.path.expanduser(setting))
    if found is None:
        raise ConfigError(
            f"{here}: no such interpreter; name that of the environment with the engine, as ENV/bin/python"
        )
    # not resolved: where the link leads is not an environment
    return os.path.abspath(found)


def absolute(setting: str) -> str:
    """The same interpreter for processes with another working directory; a bare name is looked up on their PATH."""
    return os.path.abspath(os.path.expanduser(setting)) if os.sep in setting else setting


def variables_of(interpreter: str) -> dict[str, str | None]:
    """Variables for an interpreter elsewhere (None: removed), which then imports nothing of this one's packages."""
    # the other environment takes a checkout of Fovea too, but nothing of where this one has it installed
    checkout = Path(fovea.__file__).parents[1]
    return {
        "PATH": f"{os.path.dirname(interpreter)}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "PYTHONPATH": str(checkout) if (checkout / "pyproject.toml").is_file() else None,
        "PYTHONSAFEPATH": "1",
        "PYTHONHOME": None,
        "VIRTUAL_ENV": None,
    }
