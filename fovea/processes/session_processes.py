"""Session processes left by a killed run: an environment variable marks them, and the next run ends them.

Children of a marked process have the mark too, unless it clears its environment. Processes of other machines, of other
users and of runs that are still running are not touched.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from fovea.processes.owner import Owner
from fovea_gym.processes.ending import running

MARK = "FOVEA_SESSION_OF"
"""Environment variable with the process of the run that a session belongs to, as JSON."""
MAX_MARK_BYTES = 1000
ROUNDS = 10
"""Largest number of searches: a process may start another one while it is being killed."""


def session_environment() -> dict[str, str]:
    """This process's environment variables with the mark, for a process that a session starts."""
    return {**os.environ, MARK: json.dumps(asdict(Owner.this_process()))}


def end_left_processes() -> int:
    """Kill the processes of sessions whose run was killed, with their children; returns the number of processes."""
    ended = set[int]()
    for _ in range(ROUNDS):
        found = set(_left()) - ended
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not found:
            break
        ended |= found
    return len(ended)


def _left() -> Iterator[int]:
    """Ids of marked processes whose run has ended; none if the system has no /proc."""
    for process in running():
        owner = _owner_of(process.pid)
        if process.pid != os.getpid() and owner is not None and owner.is_here and not owner.is_alive:
            yield process.pid


def _owner_of(pid: int) -> Owner | None:
    """The owner in the mark of a process, which is the process of its run; None if it has no mark."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # the process belongs to another user, or has ended
        return None
    name = f"{MARK}=".encode()
    marks = [each[len(name) :] for each in variables if each.startswith(name)]
    try:
        owner = Owner(**json.loads(marks[0][:MAX_MARK_BYTES])) if marks else None
    except (ValueError, TypeError, RecursionError):
        return None
    return owner if owner and type(owner.pid) is int and owner.pid > 0 else None
