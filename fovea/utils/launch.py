"""What torchrun says about this process in its environment."""

from __future__ import annotations

import os


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
