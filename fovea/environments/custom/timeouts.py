"""Calls of the user's code that are waited for so long and no longer.

A call runs in a thread of this process and not in a child that could be killed: the code may hold a model or a
connection, and a task any object, none of which goes to another process. The price: Python cannot end a thread, so
that a call that is late runs on beside the run, and too many of those end the run.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Lock, Thread

from fovea.errors import ScoreError, first_line, result_or_error

MAX_LATE_CALLS = 8


class FailedCallError(Exception):
    """A call that raised, or took too long; the text says which."""


class TimedCalls:
    """Runs calls, from any thread, each in one of its own."""

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._late: list[Thread] = []
        self._lock = Lock()

    def __call__(self, call: Callable[[], object], name: str) -> object:
        """What the call returns; FailedCallError where it does not, ScoreError where too many late ones still run."""
        done: Future[tuple[object, BaseException | None]] = Future()
        # a daemon: a call that never ends must not hold the end of the process
        thread = Thread(target=lambda: done.set_result(result_or_error(call)), name=name, daemon=True)
        thread.start()
        try:
            result, error = done.result(self._timeout_seconds)
        except TimeoutError:
            self._note_late(thread, name)
            raise FailedCallError(f"{name} took more than reward_timeout_seconds={self._timeout_seconds:g}") from None
        if error is not None:
            raise FailedCallError(f"{name} raised {first_line(error)}") from error
        return result

    def _note_late(self, thread: Thread, name: str) -> None:
        with self._lock:
            self._late = [each for each in self._late if each.is_alive()] + [thread]
            num_late = len(self._late)
        if num_late >= MAX_LATE_CALLS:
            raise ScoreError(
                f"{num_late} calls of {name} still run after reward_timeout_seconds={self._timeout_seconds:g} each, "
                "and a thread cannot be ended; make it end, or raise reward_timeout_seconds"
            )
