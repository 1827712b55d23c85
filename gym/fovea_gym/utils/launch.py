"""Processes that start others: the same packages in both, torchrun's variables, an end with the one that started it."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

OF_TORCHRUN = frozenset(
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    | {"GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"}
)
"""Variables by which torchrun describes a process, beside those that begin with `TORCHELASTIC_`."""
PACKAGES = ("fovea_gym", "fovea", "fovea_tools")
PR_SET_PDEATHSIG = 1  # prctl.h


def signal_at_end_of_parent(number: int) -> None:
    """Have the kernel send this process a signal when its parent ends by any cause; 0 for none. On Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def without_torchrun(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables without those of torchrun, for a process that would take the description of this one for its own.

    With TORCHELASTIC_USE_AGENT_STORE, say, it would wait for a server at an address that it has chosen itself.
    """
    return {
        name: value
        for name, value in environment.items()
        if name not in OF_TORCHRUN and not name.startswith("TORCHELASTIC_")
    }


def module_command(module: str, python: str = sys.executable) -> list[str]:
    """The command that runs a module with an interpreter, and imports nothing from the working directory."""
    return [python, "-P", "-m", module]


def with_this_fovea(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables for a `module_command` that imports the packages of this process.

    `python -m fovea` in a folder that holds it finds it there only: such a folder is put on PYTHONPATH.
    """
    found = (find_spec(name) for name in PACKAGES)
    folders = [Path(spec.origin).parents[1] for spec in found if spec is not None and spec.origin]
    if not any(folder.samefile(Path.cwd()) for folder in folders):
        return dict(environment)
    return {
        **environment,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(Path.cwd()), environment.get("PYTHONPATH")])),
    }
