"""The process that owns a lock or other processes, so that others can tell whether these are still in use."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A process that holds the lock of a run folder, or that started processes for sessions."""

    host: str
    pid: int
    started: str
    """Start time of the process in clock ticks since boot, to distinguish it from a later process with the same pid; ""
    if the system has no /proc."""

    @staticmethod
    def this_process() -> Owner:
        return Owner(host=socket.gethostname(), pid=os.getpid(), started=_start_of(os.getpid()))

    @property
    def is_here(self) -> bool:
        """True if the process runs, or ran, on this host."""
        return self.host == socket.gethostname()

    @property
    def is_alive(self) -> bool:
        """True if the process, which must be on this host, still runs."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # it runs as another user
        return _start_of(self.pid) == self.started

    def __str__(self) -> str:
        return f"process {self.pid} on host {self.host}"


def _start_of(pid: int) -> str:
    """Start time of a running process, field 22 of /proc/PID/stat (proc(5)); "" if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    # the process name comes first, in parentheses, and may itself contain spaces and parentheses
    state, *fields = stat.rpartition(")")[2].split()
    # Z and X: a process that has ended, but was not reaped
    return "" if state in "ZX" else fields[18]
