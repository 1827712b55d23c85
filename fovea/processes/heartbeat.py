"""Heartbeats: they detect a process that hangs although its connection is open.

A thread of each worker sends an empty message at an interval, whatever its other threads compute, so a call may take
hours. A driver that has received nothing for the timeout treats the worker's process as hung: stopped, starved, or on a
lost machine. A process that waits forever in a collective call still sends heartbeats; the timeout of the process group
covers that. An engine sends no heartbeats; `EngineProcess` measures its silence while a call waits for its answer.
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
    """Send heartbeats within the block, several per timeout of the driver, until `send` raises OSError."""
    ended = Event()

    def run() -> None:
        with suppress(OSError):  # OSError: the line has ended
            while not ended.wait(timeout_seconds / BEATS_PER_TIMEOUT):
                send(BEAT)

    Thread(target=run, name="heartbeat", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


class Silence:
    """Measures how long no message has arrived; times in which this process did not run do not count."""

    def __init__(self, look_seconds: float, now: float) -> None:
        """`look_seconds` is the longest time between two calls of `seconds` while this process runs."""
        self._look_seconds = look_seconds
        self._heard = self._looked = now

    def heard(self, now: float) -> None:
        """Record that a message has arrived, or that the wait for one begins."""
        self._heard = now

    def seconds(self, now: float) -> float:
        """Length of the silence in seconds; must be called at the interval `look_seconds`."""
        if now - self._looked > 3 * self._look_seconds:
            # this process itself was stopped or starved, as in a paused container, and has yet to read its messages
            self._heard = now
        self._looked = now
        return now - self._heard


class Watch:
    """The driver's side: calls `silent` once if no message arrives within the timeout."""

    def __init__(self, timeout_seconds: float, silent: Callable[[], None]) -> None:
        self._timeout_seconds = timeout_seconds
        self._look_seconds = timeout_seconds / LOOKS_PER_TIMEOUT
        self._call_silent = silent
        # created here, not in the thread, since this process may be stopped before the thread begins
        self._silence = Silence(self._look_seconds, monotonic())
        self._ended = Event()
        Thread(target=self._run, name="watch of heartbeats", daemon=True).start()

    def heard(self) -> None:
        """Record that a message has arrived."""
        self._silence.heard(monotonic())

    def end(self) -> None:
        """Stop watching."""
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(self._look_seconds):
            if self._silence.seconds(monotonic()) > self._timeout_seconds:
                self._call_silent()
                return
