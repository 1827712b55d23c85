"""Calls of an object in another process: the records that cross, and those that wait for an answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from inspect import isawaitable
from itertools import count
from operator import attrgetter
from threading import Thread
from typing import Any, Generic, TypeAlias, TypeVar

from fovea.processes.messages import Packing, Share
from fovea_gym.errors import FoveaError

Lost = TypeVar("Lost", bound=FoveaError)
"""The error of calls whose process has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call of a method of the object that a process serves."""

    method: str
    """Name of the method, or that of a part of the object before it, as `policy.update`."""
    arguments: Sequence[Any] | Share = ()
    returns: bool = True
    """False: the caller does not need the result of this process, since another returns the same."""

    async def make(self, target: object) -> Any:
        """Make the call in the process of the object."""
        result = attrgetter(self.method)(target)(*self.arguments)
        if isawaitable(result):
            result = await result
        return result if self.returns else None


NumberedCalls: TypeAlias = Sequence[tuple[int, Call]]
"""A message to the process: calls, and the numbers by which their answers name them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A message from the process: the end of a call."""

    number: int
    value: Any = None
    error: BaseException | None = None
    """The exception that ended the call."""


class RemoteCalls(Generic[Lost]):
    """Calls that wait for their answers, by number, the thread that hands those over, and the encoding of this end."""

    def __init__(
        self,
        receive: Callable[[], bytes],
        end: Callable[[Exception], Lost],
        unreadable: Callable[[Exception], FoveaError] | None = None,
    ) -> None:
        """`receive` blocks until an answer arrives, and raises once none will; `end` makes the error of calls then.

        `unreadable` makes it where an answer cannot be read; None: such an answer ends the line.
        """
        self.packing = Packing()
        self.lost: Lost | None = None
        """Set once no answer can arrive any more."""
        self._receive, self._end, self._unreadable = receive, end, unreadable
        self._numbers = count()
        self._results: dict[int, Future[Any]] = {}
        self.reader = Thread(target=self._read, name="answers of another process", daemon=True)
        """To be started once calls may be made, and answers come."""

    def __bool__(self) -> bool:
        """True if a call waits for its answer."""
        return bool(self._results)

    def add(self) -> tuple[int, Future[Any]]:
        """Number of a new call, and its result to come."""
        number, result = next(self._numbers), Future[Any]()
        # a caller that is cancelled waits no longer, but its answer still arrives
        result.set_running_or_notify_cancel()
        self._results[number] = result
        return number, result

    def fail(self, error: Exception) -> None:
        """Raise an error wherever a result is waited for."""
        # two threads may come here at once
        with suppress(KeyError):
            while True:
                self._results.popitem()[1].set_exception(error)

    def _read(self) -> None:
        """Hand answers to their callers until the line ends; then fail those that still wait."""
        try:
            while True:
                self._take(self._receive())
        except Exception as error:  # all kinds: if this thread died silently, callers would wait forever
            # set first: a call that comes too late to be failed below finds it
            self.lost = self._end(error)
            self.fail(self.lost)

    def _take(self, message: bytes) -> None:
        try:
            answer: Answer = self.packing.unpack(message)
        except Exception as error:
            if self._unreadable is None:
                raise
            # the number of its call is in what cannot be read
            return self.fail(self._unreadable(error))
        result = self._results.pop(answer.number, None)
        if result is None:  # a call that could not be sent has failed all others
            return None
        return result.set_result(answer.value) if answer.error is None else result.set_exception(answer.error)
