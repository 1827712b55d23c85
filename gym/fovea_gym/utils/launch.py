"""Starting child processes: the packages of this process, torchrun's variables, and a signal when the parent ends."""

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
"""Variables with which torchrun describes a process, in addition to those that begin with `TORCHELASTIC_`."""
PACKAGES = ("fovea_gym", "fovea", "fovea_tools")
PR_SET_PDEATHSIG = 1  # prctl.h


def signal_at_end_of_parent(number: int) -> None:
    """Have the kernel send this process a signal when its parent ends for any reason; 0 turns this off. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def without_torchrun(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables without those of torchrun, for a child that would otherwise take over this process's rank.

    With TORCHELASTIC_USE_AGENT_STORE, for example, the child would wait for a store at an address that it chose itself.
    """
    return {
        name: value
        for name, value in environment.items()
        if name not in OF_TORCHRUN and not name.startswith("TORCHELASTIC_")
    }


def module_command(module: str, python: str = sys.executable) -> list[str]:
    """The command that runs a module with an interpreter, without the working directory on its import path."""
    return [python, "-P", "-m", module]


def with_this_fovea(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables for a `module_command` that imports the same packages as this process.

    If this process imported them from the working directory, as `python -m fovea` does, PYTHONPATH gets that directory.
    """
    found = (find_spec(name) for name in PACKAGES)
    folders = [Path(spec.origin).parents[1] for spec in found if spec is not None and spec.origin]
    if not any(folder.samefile(Path.cwd()) for folder in folders):
        return dict(environment)
    return {
        **environment,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(Path.cwd()), environment.get("PYTHONPATH")])),
    }
