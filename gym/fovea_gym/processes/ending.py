"""The end of a process with all below it; run as a script, the watcher that ends a process when its parent is gone.

The script is started by its path, without site-packages: it imports the standard library only. What is below a process
is read from /proc: where there is none, as on macOS, only the process's group ends with it.
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
"""Longest wait for the processes that were killed."""


class Process(NamedTuple):
    """A running process, as /proc has it."""

    pid: int
    parent: int
    group: int


def running() -> Iterator[Process]:
    """All processes of this machine but those that have ended, and which nobody has reaped."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        # a name may hold spaces and parentheses; a process may end meanwhile
        with suppress(OSError):
            state, parent, group, *_ = stat.read_text(errors="replace").rpartition(")")[2].split()
            if state not in "ZX":
                yield Process(int(stat.parent.name), int(parent), int(group))


def with_all_below(pid: int) -> set[Process]:
    """A running process and all that it, and they, have started."""
    everything, pids = list(running()), {pid}
    while more := {each.pid for each in everything if each.parent in pids} - pids:
        pids |= more
    return {each for each in everything if each.pid in pids}


def signal_groups(groups: Set[int], number: int) -> None:
    """Send a signal to process groups, which may have ended."""
    for group in groups:
        with suppress(ProcessLookupError):
            os.killpg(group, number)


def kill_below(pid: int) -> None:
    """Kill a process that may share this one's group, all below it, and their other groups."""
    below = with_all_below(pid)
    signal_groups({each.group for each in below} - {os.getpgrp()}, signal.SIGKILL)
    for each in {pid, *(each.pid for each in below)}:
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def wait_until_gone(groups: Set[int], seconds: float) -> None:
    """Wait until no process of some process groups runs, for some seconds at most.

    A killed process holds its memory for a moment. One that nobody reaps, as in a container without an init, has given
    back everything.
    """
    end = monotonic() + seconds
    while monotonic() < end and any(each.group in groups for each in running()):
        sleep(GONE_SECONDS)


def end_group(group: int, grace_seconds: float) -> None:
    """End a process group and all below it, at first by SIGTERM, with some seconds to delete what outlives a process.

    Shared memory does, which stays in /dev/shm.
    """
    groups = {group, *(each.group for each in with_all_below(group))}
    if grace_seconds:
        signal_groups(groups, signal.SIGTERM)
        wait_until_gone(groups, grace_seconds)
    signal_groups(groups, signal.SIGKILL)
    # one that still ends could write to a folder that is deleted
    wait_until_gone(groups, CLOSE_SECONDS)


def watch(parent: int, group: int, grace_seconds: float, folder: str) -> None:
    """Wait for the end of the parent, however it goes and whenever it went; end the group and delete its folder."""
    # its pipe closes at once, unless a process that it has forked holds it
    while os.getppid() == parent and not select.select([0], [], [], LOOK_SECONDS)[0]:
        pass
    end_group(group, grace_seconds)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    watch(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4])
