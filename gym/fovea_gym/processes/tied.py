"""Script that replaces itself by another program, which the kernel kills when the parent process ends, even by kill -9.

It is run by its path, without site-packages: `tied.py PARENT PROGRAM ARGUMENT...`. Outside Linux the program learns
only from the end of its stdin that the parent has ended.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1  # prctl.h


def become(parent: int, command: Sequence[str]) -> None:
    """Replace this process by a command that is killed when the parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == parent:  # else the parent ended before prctl was called
        os.execvp(command[0], list(command))


if __name__ == "__main__":
    become(int(sys.argv[1]), sys.argv[2:])
