"""Results that threads compute ahead of their use."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")
Work = tuple[Future[Result], Callable[[], Result]]


class Prefetch(Generic[Key, Result]):
    """The results of some work by key, computed in the order in which they were asked for.

    Nothing but time depends on it: whoever takes a result that is not begun computes it as if there were no threads.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._num_threads, self._name = num_threads, name
        self.ahead: dict[Key, Future[Result]] = {}
        self._queue: SimpleQueue[Work[Result] | None] | None = None

    def begin(self, works: Mapping[Key, Callable[[], Result]]) -> None:
        """Compute these results ahead, and drop all others: no more than these are ever kept."""
        for key in self.ahead.keys() - works.keys():
            self.ahead.pop(key).cancel()
        for key, work in works.items():
            if key not in self.ahead:
                self.ahead[key] = Future()
                self._started().put((self.ahead[key], work))

    def take(self, key: Key) -> Callable[[], Result] | None:
        """A function that waits for the result of a key, or raises its error; None where no thread has begun on it."""
        future = self.ahead.pop(key, None)
        return None if future is None or future.cancel() else future.result

    def _started(self) -> SimpleQueue[Work[Result] | None]:
        if self._queue is None:
            self._queue = SimpleQueue()
            for _ in range(self._num_threads):
                # no threads of a pool, whose work Python finishes before it exits
                Thread(target=_serve, args=(self._queue,), name=self._name, daemon=True).start()
            weakref.finalize(self, _end, self._queue, self._num_threads)
        return self._queue


def _serve(queue: SimpleQueue[Work[Result] | None]) -> None:
    """Compute what is in the queue, until there is a None."""
    while (asked := queue.get()) is not None:
        future, work = asked
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)
        # else both would live until there is more to do
        del asked, future, work


def _end(queue: SimpleQueue[Work[Result] | None], num_threads: int) -> None:
    for _ in range(num_threads):
        queue.put(None)
