"""Running a coroutine from synchronous code."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from threading import Thread
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


async def gather_or_cancel(coroutines: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """The results of all, in order; when one raises, the others are cancelled before its error is raised."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        raise


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel the tasks that an error left pending and wait until they have ended."""
    pending = asyncio.all_tasks(loop)
    for task in pending:
        task.cancel()
    if pending:
        loop.run_until_complete(asyncio.wait(pending))


class BackgroundLoop:
    """An event loop in a thread of its own, for work that must go on while the run's loop computes."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """The result of a coroutine on that loop; awaited from another loop."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._started()))

    def close(self) -> None:
        """Stop the loop and its thread; a later `run` starts another."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            Thread(target=self._loop.run_forever, name=self._name, daemon=True).start()
        return self._loop
