"""Ending a process with all its descendants; run as a script, a watcher that does so when the parent process is gone.

The script is started by its path, without site-packages, so it imports only the standard library. Descendants are found
in /proc; on a system without it, such as macOS, only the process's group is ended.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
from collections.abc import Iterator, Set
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import NamedTuple

LOOK_SECONDS = 0.5
GONE_SECONDS = 0.01
CLOSE_SECONDS = 20.0
"""Longest wait for killed processes to disappear."""


class Process(NamedTuple):
    """A running process, as listed in /proc."""

    pid: int
    parent: int
    group: int


def running() -> Iterator[Process]:
    """All running processes of this machine; zombies are left out."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        # a process name may contain spaces and parentheses; a process may end while it is read
        with suppress(OSError):
            state, parent, group, *_ = stat.read_text(errors="replace").rpartition(")")[2].split()
            if state not in "ZX":
                yield Process(int(stat.parent.name), int(parent), int(group))


def with_all_below(pid: int) -> set[Process]:
    """A running process and all its descendants."""
    everything, pids = list(running()), {pid}
    while more := {each.pid for each in everything if each.parent in pids} - pids:
        pids |= more
    return {each for each in everything if each.pid in pids}


def signal_groups(groups: Set[int], number: int) -> None:
    """Send a signal to process groups; groups that have ended are skipped."""
    for group in groups:
        with suppress(ProcessLookupError):
            os.killpg(group, number)


def kill_below(pid: int) -> None:
    """Kill a process, its descendants and their groups, except the group of the calling process."""
    below = with_all_below(pid)
    signal_groups({each.group for each in below} - {os.getpgrp()}, signal.SIGKILL)
    for each in {pid, *(each.pid for each in below)}:
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def wait_until_gone(groups: Set[int], seconds: float) -> None:
    """Wait until no process of the process groups runs, for at most `seconds`.

    A killed process holds its memory for a moment. A zombie, which stays in a container without an init, has already
    released everything.
    """
    end = monotonic() + seconds
    while monotonic() < end and any(each.group in groups for each in running()):
        sleep(GONE_SECONDS)


def end_group(group: int, grace_seconds: float) -> None:
    """End a process group and all its descendants: SIGTERM first, and SIGKILL `grace_seconds` later.

    The grace period lets processes delete what would outlive them, such as shared memory in /dev/shm.
    """
    groups = {group, *(each.group for each in with_all_below(group))}
    if grace_seconds:
        signal_groups(groups, signal.SIGTERM)
        wait_until_gone(groups, grace_seconds)
    signal_groups(groups, signal.SIGKILL)
    # a process that is still ending could write to a folder that the caller deletes
    wait_until_gone(groups, CLOSE_SECONDS)


def watch(parent: int, group: int, grace_seconds: float, folder: str) -> None:
    """Wait until the parent has ended, for any reason or even before this call; end the group and delete `folder`."""
    # the parent's pipe closes at once, unless a process that it has forked holds the pipe
    while os.getppid() == parent and not select.select([0], [], [], LOOK_SECONDS)[0]:
        pass
    end_group(group, grace_seconds)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    watch(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4])
