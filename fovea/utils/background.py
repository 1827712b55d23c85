"""Work on a thread of its own, beside the thread that trains."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

Result = TypeVar("Result")


def in_background(work: Callable[[], Result], name: str) -> Future[Result]:
    """Begin some work on a thread, which the end of the process does not wait for; its result or error, to come."""
    result = Future[Result]()
    # a caller that waits no longer does not end the work
    result.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    # not of a pool, whose threads Python waits for
    Thread(target=run, name=name, daemon=True).start()
    return result
