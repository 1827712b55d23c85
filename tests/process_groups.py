"""The processes of a process group, for tests of what is left of one."""

from __future__ import annotations

import os

import psutil


def members(group: int) -> list[psutil.Process]:
    """The living processes of a process group."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, ProcessLookupError):
            pass
    return found
