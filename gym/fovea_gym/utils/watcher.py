"""Script of the separate process of a `LoopWatch`: it ends the parent process when the watched event loop is blocked.

It is run by its path and imports only the modules below, so that it starts in 20 ms and takes 10 MB. Its arguments are
the parent's process id, the seconds without heartbeats after which to end it, and the message for stderr.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from pathlib import Path

LOOK_SECONDS = 0.5
WATCHED = ord("+")
"""Byte of a heartbeat during calls; heartbeats between calls have another byte."""


def watch(parent: int, seconds: float, message: str) -> None:
    """Read heartbeats from stdin until it closes; send SIGQUIT to the parent after `seconds` of silence in a call."""
    is_watched, silent_seconds = False, 0.0
    while os.getppid() == parent:
        if select.select([0], [], [], LOOK_SECONDS)[0]:
            beats = os.read(0, 4096)
            if not beats:
                return
            is_watched, silent_seconds = beats[-1] == WATCHED, 0.0
        # count iterations instead of reading a clock, so that a sleeping machine or a paused container does not count
        elif is_watched and not _is_stopped(parent):
            silent_seconds += LOOK_SECONDS
        if silent_seconds >= seconds:
            os.write(2, f"\n{message}\n".encode())
            os.kill(parent, signal.SIGQUIT)
            return


def _is_stopped(process: int) -> bool:
    """True if a process is stopped, for instance by SIGSTOP; False if /proc does not tell."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False


if __name__ == "__main__":
    watch(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3])
