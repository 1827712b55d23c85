"""What torchrun says about this process in its environment."""

from __future__ import annotations

import os
from collections.abc import Mapping

OF_TORCHRUN = frozenset(
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    | {"GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"}
)
"""Variables by which torchrun describes a process, beside those that begin with `TORCHELASTIC_`."""


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


def without_torchrun(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables without those of torchrun, for a process that would take the description of this one for its own.

    With TORCHELASTIC_USE_AGENT_STORE, say, it would wait for a server at an address that it has chosen itself.
    """
    return {
        name: value
        for name, value in environment.items()
        if name not in OF_TORCHRUN and not name.startswith("TORCHELASTIC_")
    }
