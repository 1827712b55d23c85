"""Blocking calls of the user's code, awaited from an event loop.

A call runs in a thread of this process and not in a child that could be killed: the code may hold a model or a
connection, and a task any object, none of which goes to another process. The price: Python cannot end a thread, so
that a call that is given up runs on beside the run, and too many of those end the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import Protocol

from fovea.environments.graders.base import NoScoreError
from fovea.errors import ScoreError, raised, result_or_error

MAX_LATE_CALLS = 8


class BlockingCalls(Protocol):
    """Runs calls that block, one at a time or several."""

    async def run(self, call: Callable[[], object]) -> object:
        """The result of a call; NoScoreError where it raises."""
        ...


class CallThreads:
    """Threads for calls of one piece of code, each call in one of its own; to be used from one event loop."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._late: list[Thread] = []

    async def run(self, call: Callable[[], object]) -> object:
        """The result of a call. NoScoreError where it raises, ScoreError where too many calls given up still run."""
        done: Future[tuple[object, BaseException | None]] = Future()
        done.set_running_or_notify_cancel()  # from here on a timeout cannot cancel it under the thread's hands
        # a daemon: a call that never ends must not hold the end of the process
        thread = Thread(target=lambda: done.set_result(result_or_error(call)), name=self._name, daemon=True)
        thread.start()
        try:
            result, error = await asyncio.wrap_future(done)
        except asyncio.CancelledError:
            self._note_late(thread)
            raise
        return result_of(result, error)

    def _note_late(self, thread: Thread) -> None:
        self._late = [each for each in self._late if each.is_alive()] + [thread]
        if len(self._late) >= MAX_LATE_CALLS:
            raise ScoreError(
                f"{len(self._late)} calls of {self._name} still run after reward_timeout_seconds each, and a thread "
                "cannot be ended; make it end, or raise reward_timeout_seconds"
            )


def result_of(result: object, error: BaseException | None) -> object:
    """The result of a call; NoScoreError where it has raised."""
    if error is not None:
        raise NoScoreError(raised(error)) from error
    return result
