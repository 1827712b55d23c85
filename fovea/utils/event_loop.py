"""Running a coroutine from synchronous code."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from threading import Thread
from typing import Any, TypeVar

MAX_ENDING_SECONDS = 10.0
Result = TypeVar("Result")


def wait_for(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine to its end and return its result: `asyncio.run` without a signal handler.

    Below a running loop, as in a cell of a notebook, it runs in a thread; Ctrl-C cancels it, waits for its end and is
    raised.
    """
    loop = asyncio.new_event_loop()
    task = loop.create_task(coroutine)
    return _complete_in_thread(loop, task) if _is_below_a_loop() else _complete(loop, task)


def _is_below_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _complete(loop: asyncio.AbstractEventLoop, task: asyncio.Task[Result]) -> Result:
    # to remove its handler, CPython 3.11's asyncio.run formats the result as text and throws the text away: 37 ms of a
    # 125 ms step whose result holds arrays
    try:
        return loop.run_until_complete(task)
    except BaseException:
        # the error is raised to the caller: asyncio need not log it again for every task that it ended
        loop.set_exception_handler(lambda *_: None)
        raise
    finally:
        try:
            _cancel_all(loop)
        finally:
            loop.close()


def _complete_in_thread(loop: asyncio.AbstractEventLoop, task: asyncio.Task[Result]) -> Result:
    # a thread, because asyncio runs one loop in each; the task keeps the context of the caller, by which a notebook
    # finds the cell that output belongs to
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="fovea") as thread:
        done = thread.submit(_complete, loop, task)
        try:
            return done.result()
        except (KeyboardInterrupt, SystemExit):  # signal handlers raise them in the main thread only
            with suppress(RuntimeError):  # the loop is closed: the coroutine ended meanwhile
                loop.call_soon_threadsafe(task.cancel)
            raise


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
        ended = asyncio.run_coroutine_threadsafe(_outcome(coroutine), self._started())
        return (await asyncio.wrap_future(ended)).result()

    def wait(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """The result of a coroutine on that loop; blocks the calling thread until then."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._started()).result()

    def close(self, *endings: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Await the endings on the loop, then stop it and its thread; a later `run` starts another.

        What still runs on the loop is cancelled. A loop that never ran has nothing to end.
        """
        if self._loop is None:
            return
        try:
            for ending in endings:
                asyncio.run_coroutine_threadsafe(ending(), self._loop).result(timeout=MAX_ENDING_SECONDS)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            Thread(target=_run_until_stopped, args=(self._loop,), name=self._name, daemon=True).start()
        return self._loop


async def _outcome(coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
    """The result or the error of a coroutine, as a future that is done.

    An error that comes while the waiting side is cancelled would be the task's own, which nobody is left to take:
    asyncio prints it with its traceback.
    """
    outcome: Future[Result] = Future()
    try:
        outcome.set_result(await coroutine)
    except Exception as error:
        outcome.set_exception(error)
    return outcome


def _run_until_stopped(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        try:
            # whoever awaited them is gone: without this, collecting them prints a traceback for each
            loop.set_exception_handler(lambda *_: None)
            _cancel_all(loop)
        finally:
            loop.close()
