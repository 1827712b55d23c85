"""Processes that start others: this Fovea in both, torchrun's variables, and an end with the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from fovea.errors import ClusterError

OF_TORCHRUN = frozenset(
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    | {"GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"}
)
"""Variables by which torchrun describes a process, beside those that begin with `TORCHELASTIC_`."""
PR_SET_PDEATHSIG = 1  # prctl.h
KNOCK_SECONDS = 10.0


def num_processes() -> int:
    """The number of processes that torchrun has started; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def num_local_processes() -> int:
    """The number of those that are on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def local_rank() -> int:
    """The index of this process among those of its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def rank() -> int:
    """The index of this process among all of torchrun's."""
    return int(os.environ.get("RANK", "0"))


def is_worker() -> bool:
    """True in all processes of torchrun but the first, which is the driver."""
    return rank() > 0


def signal_at_end_of_parent(number: int) -> None:
    """Have the kernel send this process a signal when its parent ends by any cause; 0 for none. On Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def is_of_torchrun() -> bool:
    """True if torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def end_with_torchrun(number: int = signal.SIGKILL) -> None:
    """Have this process get a signal when torchrun, if it has started this one, is killed."""
    # of the processes of other launchers the parent may be a script that ends before them
    if is_of_torchrun():
        signal_at_end_of_parent(number)


def check_torchrun() -> None:
    """End with torchrun from here on; ClusterError if it was killed before."""
    end_with_torchrun()
    if is_of_torchrun() and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        try:
            socket.create_connection(address, timeout=KNOCK_SECONDS).close()
        except OSError as error:
            raise ClusterError(
                f"torchrun cannot be reached at {address[0]}:{address[1]} ({error}): it was killed while this process "
                "started; start it again"
            ) from error


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
    """The variables for a `module_command` that imports the Fovea of this process.

    `python -m fovea` in a folder that holds it finds it there only: such a folder is put on PYTHONPATH.
    """
    folder = Path(__file__).parents[2]
    if not folder.samefile(Path.cwd()):
        return dict(environment)
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, [str(folder), environment.get("PYTHONPATH")]))}
