"""Running a coroutine from synchronous code."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


def wait_for(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine to its end and return its result: `asyncio.run` without a signal handler."""
    # to remove its handler, CPython 3.11's asyncio.run formats the result as text and throws the text away: 37 ms of a
    # 125 ms step whose result holds arrays
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(coroutine)
    except BaseException:
        # the error is raised to the caller: asyncio need not log it again for every task that it ended
        loop.set_exception_handler(lambda *_: None)
        raise
    finally:
        try:
            _cancel_all(loop)
        finally:
            loop.close()


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel the tasks that an error left pending and wait until they have ended."""
    pending = asyncio.all_tasks(loop)
    for task in pending:
        task.cancel()
    if pending:
        loop.run_until_complete(asyncio.wait(pending))
