"""A process started by torchrun: its rank, the number of processes, and its end when torchrun ends."""

from __future__ import annotations

import os
import signal
import socket

from fovea_gym.errors import ClusterError
from fovea_gym.utils.launch import signal_at_end_of_parent

KNOCK_SECONDS = 10.0


def num_processes() -> int:
    """The number of processes that torchrun started; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def num_local_processes() -> int:
    """The number of processes that torchrun started on this machine; 1 without torchrun."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def local_rank() -> int:
    """The index of this process among those on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def rank() -> int:
    """The index of this process among all processes of torchrun."""
    return int(os.environ.get("RANK", "0"))


def is_worker() -> bool:
    """True in all processes of torchrun except the first, which is the driver."""
    return rank() > 0


def is_of_torchrun() -> bool:
    """True if torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def end_with_torchrun(number: int = signal.SIGKILL) -> None:
    """Send this process a signal when torchrun is killed, if torchrun started it."""
    # only for torchrun: with other launchers, the parent may be a script that ends before its processes
    if is_of_torchrun():
        signal_at_end_of_parent(number)


def check_torchrun() -> None:
    """End this process when torchrun is killed from now on; ClusterError if it has already been killed."""
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
