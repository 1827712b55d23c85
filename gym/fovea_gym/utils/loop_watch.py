"""Watchdog for an event loop that user code can block by holding Python's interpreter lock, or by never awaiting.

Neither a thread of this process nor a signal handler in Python can end such a call. So a small separate process
(`watcher.py`) receives a heartbeat of the loop every second. Without heartbeats it sends SIGQUIT, whose handlers are C
functions: faulthandler prints the current line of every thread, and `_exit` ends the process with the signal's number,
which is 3, the exit code of a process that hangs.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache

from fovea_gym.errors import ClusterError
from fovea_gym.utils import watcher

BEAT_SECONDS = 1.0


class LoopWatch:
    """Ends this process with code 3 when the loop has not run for `seconds` during a call."""

    def __init__(self, seconds: float, message: str) -> None:
        """`message` is printed to stderr before the current lines of all threads."""
        self._command = [sys.executable, "-I", "-S", watcher.__file__, str(os.getpid()), str(seconds), message]
        self._num_calls = 0
        self._beats: asyncio.Task[None] | None = None
        self._pipe = -1

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Watch the running loop during a call; calls may overlap."""
        self._start()
        self._num_calls += 1
        self._send()
        try:
            yield
        finally:
            self._num_calls -= 1
            self._send()

    def _start(self) -> None:
        # start again if the loop of the last heartbeats has ended; not under a debugger, which may halt the loop
        if (self._beats is None or self._beats.done()) and not _is_debugged():
            exit_on_sigquit()
            # a separate session, so that Ctrl-C in a terminal reaches only the run
            process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, bufsize=0, start_new_session=True
            )
            assert process.stdin is not None
            self._pipe = process.stdin.fileno()
            os.set_blocking(self._pipe, False)
            self._beats = asyncio.create_task(self._beat(process))

    async def _beat(self, process: subprocess.Popen[bytes]) -> None:
        with process:
            try:
                while True:
                    self._send()
                    await asyncio.sleep(BEAT_SECONDS)
            finally:
                self._pipe = -1  # after the pipe is closed, another file may get its number

    def _send(self) -> None:
        with suppress(OSError):  # the watcher was killed or stopped: the run continues without it
            os.write(self._pipe, b"+" if self._num_calls else b"-")


def _is_debugged() -> bool:
    return sys.gettrace() is not None or not sys.modules.keys().isdisjoint({"debugpy", "pydevd"})


@cache
def exit_on_sigquit() -> None:
    """Make SIGQUIT print the line of every thread and exit with the signal's number, without the interpreter lock."""
    assert ClusterError.exit_code == signal.SIGQUIT, ClusterError.exit_code
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    libc.signal(signal.SIGQUIT, ctypes.cast(libc._exit, ctypes.c_void_p))
    faulthandler.register(signal.SIGQUIT, file=2, chain=True)
