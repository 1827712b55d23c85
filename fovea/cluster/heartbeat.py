"""Heartbeats: a worker that hangs is noticed although its connection is open.

A thread of the worker sends an empty message at an interval, whatever its other threads compute, so that a call may
take hours. A driver that has heard nothing for a time takes the worker's process as hung: stopped, starved, or on a
machine that is gone. A process that waits for ever in a collective call beats on: the process group's timeout is for
that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread
from time import monotonic

BEAT = b""
BEATS_PER_TIMEOUT = 5
LOOKS_PER_TIMEOUT = 10


@contextmanager
def beating(send: Callable[[bytes], None], timeout_seconds: float) -> Iterator[None]:
    """Send beats within the block, several for each timeout of the driver, until `send` raises OSError."""
    ended = Event()

    def run() -> None:
        with suppress(OSError):  # the line has ended
            while not ended.wait(timeout_seconds / BEATS_PER_TIMEOUT):
                send(BEAT)

    Thread(target=run, name="heartbeat", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


class Watch:
    """The driver's side: calls `silent` once if nothing is heard for the timeout."""

    def __init__(self, timeout_seconds: float, silent: Callable[[], None]) -> None:
        self._silent = silent
        self._heard = monotonic()
        self._ended = Event()
        Thread(target=self._run, args=(timeout_seconds,), name="watch of heartbeats", daemon=True).start()

    def heard(self) -> None:
        """Note that a message has arrived."""
        self._heard = monotonic()

    def end(self) -> None:
        """Watch no more."""
        self._ended.set()

    def _run(self, timeout_seconds: float) -> None:
        pause = timeout_seconds / LOOKS_PER_TIMEOUT
        looked = self._heard  # this process may be stopped before its thread gets here
        while not self._ended.wait(pause):
            now = monotonic()
            if now - looked > 3 * pause:
                # this process itself was stopped or starved, and has not yet read what came meanwhile
                self._heard = now
            looked = now
            if now - self._heard > timeout_seconds:
                self._silent()
                return
