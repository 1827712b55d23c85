"""Script that becomes another program, which the kernel kills when the process that started it ends, by kill -9 too.

It is run by its path, without site-packages: `tied.py PARENT PROGRAM ARGUMENT...`. Outside Linux only the end of its
stdin says that the parent has gone.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1  # prctl.h


def become(parent: int, command: Sequence[str]) -> None:
    """Run a command in place of this process, tied to the parent's life."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == parent:  # else it ended before the kernel was asked
        os.execvp(command[0], list(command))


if __name__ == "__main__":
    become(int(sys.argv[1]), sys.argv[2:])
