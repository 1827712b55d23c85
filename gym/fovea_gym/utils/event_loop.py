"""Event loops: running coroutines from synchronous code, loops in threads, and work computed ahead in threads."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Callable, Coroutine, Hashable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from threading import Thread
from typing import Any, Generic, TypeVar

LOG = logging.getLogger(__name__)
MAX_ENDING_SECONDS = 10.0
SLOW_SECONDS = 5.0
"""Seconds of waiting for a server after which a warning says what is awaited."""
Result = TypeVar("Result")


def wait_for(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine to its end and return its result: `asyncio.run` without a signal handler.

    If a loop already runs in this thread, as in a notebook cell, the coroutine runs in another thread; Ctrl-C cancels
    it, and KeyboardInterrupt is raised once it has ended.
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
    # to remove its signal handler, CPython 3.11's asyncio.run formats the result as text and discards the text, which
    # takes 37 ms of a 125 ms step whose result holds arrays
    try:
        return loop.run_until_complete(task)
    except BaseException:
        # the caller gets the error, so asyncio need not also log it for every task that it ended
        loop.set_exception_handler(lambda *_: None)
        raise
    finally:
        try:
            _cancel_all(loop)
        finally:
            loop.close()


def _complete_in_thread(loop: asyncio.AbstractEventLoop, task: asyncio.Task[Result]) -> Result:
    # asyncio allows one running loop per thread, hence a new thread; the task keeps the caller's context, by which a
    # notebook assigns output to its cell
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="fovea") as thread:
        done = thread.submit(_complete, loop, task)
        try:
            return done.result()
        except (KeyboardInterrupt, SystemExit):  # signal handlers raise them in the main thread only
            with suppress(RuntimeError):  # the loop is closed if the coroutine has ended in the meantime
                loop.call_soon_threadsafe(task.cancel)
            raise


async def gather_or_cancel(coroutines: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """The results of all coroutines, in order; if one raises, the others are cancelled before its error is raised."""
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


@contextmanager
def warning_if_slow(waiting: str, limit_seconds: float) -> Iterator[None]:
    """Log a warning once a wait lasts SLOW_SECONDS; `waiting` reads like `x has not answered`. Needs a running loop."""
    text = "%s for %g seconds; waiting for up to %g seconds"
    timer = asyncio.get_running_loop().call_later(SLOW_SECONDS, LOG.warning, text, waiting, SLOW_SECONDS, limit_seconds)
    try:
        yield
    finally:
        timer.cancel()


class BackgroundLoop:
    """An event loop in a separate thread, for work that must continue while the run's loop computes."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine on this loop and return its result; to be awaited from another loop."""
        ended = asyncio.run_coroutine_threadsafe(_outcome(coroutine), self._started())
        return (await asyncio.wrap_future(ended)).result()

    async def run_to_end(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """As `run`, but cancelling the caller ends neither the coroutine nor the wait for it.

        The cancellation is raised once the coroutine has ended.
        """
        ended = asyncio.run_coroutine_threadsafe(_outcome(coroutine), self._started())
        cancelled: asyncio.CancelledError | None = None
        while not ended.done():
            # await a new future each time: cancelling the future of `asyncio.wrap_future` would cancel the coroutine
            waiting = _Wakening(asyncio.get_running_loop())
            ended.add_done_callback(waiting.wake)
            try:
                await waiting.future
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled
        return ended.result().result()

    def wait(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine on this loop and return its result; blocks the calling thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._started()).result()

    def close(self, *endings: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Await the endings on the loop, then stop the loop and its thread; a later `run` starts a new one.

        Tasks that still run on the loop are cancelled. If the loop never ran, the endings are not called.
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


class _Wakening:
    """A future of a loop that another thread completes."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.future = loop.create_future()

    def wake(self, _: object) -> None:
        with suppress(RuntimeError):  # the loop may have been closed in the meantime
            self._loop.call_soon_threadsafe(self._complete)

    def _complete(self) -> None:
        if not self.future.done():
            self.future.set_result(None)


async def _outcome(coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
    """The result or the error of a coroutine, as a completed future.

    If the coroutine raised while the waiting side is cancelled, nobody would retrieve the task's exception, and asyncio
    would print its traceback.
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
            # nobody awaits these tasks any more: without this, asyncio would print a traceback for each
            loop.set_exception_handler(lambda *_: None)
            _cancel_all(loop)
        finally:
            loop.close()


def in_background(work: Callable[[], Result], name: str) -> Future[Result]:
    """Start `work` in a daemon thread and return a future of its result or error."""
    result = Future[Result]()
    # a caller that stops waiting does not cancel the work
    result.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    # not a thread of a pool: Python waits for these at exit
    Thread(target=run, name=name, daemon=True).start()
    return result


Key = TypeVar("Key", bound=Hashable)

PrefetchWork = tuple[Future[Result], Callable[[], Result]]


class Prefetch(Generic[Key, Result]):
    """Results of work by key, computed ahead in threads in the order of the requests.

    It only saves time: if no thread has begun on a result, the caller that takes it computes it as without threads.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._num_threads, self._name = num_threads, name
        self.ahead: dict[Key, Future[Result]] = {}
        self._queue: SimpleQueue[PrefetchWork[Result] | None] | None = None

    def begin(self, works: Mapping[Key, Callable[[], Result]]) -> None:
        """Compute these results ahead and drop all others, so that no others are kept in memory."""
        for key in self.ahead.keys() - works.keys():
            self.ahead.pop(key).cancel()
        for key, work in works.items():
            if key not in self.ahead:
                self.ahead[key] = Future()
                self._started().put((self.ahead[key], work))

    def take(self, key: Key) -> Callable[[], Result] | None:
        """A function that waits for the result of a key, or raises its error; None if no thread has begun on it."""
        future = self.ahead.pop(key, None)
        return None if future is None or future.cancel() else future.result

    def _started(self) -> SimpleQueue[PrefetchWork[Result] | None]:
        if self._queue is None:
            self._queue = SimpleQueue()
            for _ in range(self._num_threads):
                # not threads of a pool: Python finishes their work before it exits
                Thread(target=_serve, args=(self._queue,), name=self._name, daemon=True).start()
            weakref.finalize(self, _end, self._queue, self._num_threads)
        return self._queue


def _serve(queue: SimpleQueue[PrefetchWork[Result] | None]) -> None:
    """Compute the work in the queue until a None arrives."""
    while (asked := queue.get()) is not None:
        future, work = asked
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)
        # else these objects would live until the queue has more work
        del asked, future, work


def _end(queue: SimpleQueue[PrefetchWork[Result] | None], num_threads: int) -> None:
    for _ in range(num_threads):
        queue.put(None)
