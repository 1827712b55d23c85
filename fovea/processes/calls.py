"""Calls of an object in another process: the records that are sent, and the calls that wait for an answer."""

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
"""Type of the error of calls whose process has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A method call on the object that a process serves."""

    method: str
    """Name of the method, which may begin with a part of the object, as in `policy.update`."""
    arguments: Sequence[Any] | Share = ()
    returns: bool = True
    """False if the caller does not need the result of this process, since another process returns the same."""

    async def make(self, target: object) -> Any:
        """Make the call in the process of the object."""
        result = attrgetter(self.method)(target)(*self.arguments)
        if isawaitable(result):
            result = await result
        return result if self.returns else None


NumberedCalls: TypeAlias = Sequence[tuple[int, Call]]
"""A message to the process: calls, each with the number that its answer repeats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A message from the process: the result or error of a call."""

    number: int
    value: Any = None
    error: BaseException | None = None
    """The exception that ended the call."""


class RemoteCalls(Generic[Lost]):
    """Calls that wait for answers, by number, with the thread that receives the answers, and this end's encoding."""

    def __init__(
        self,
        receive: Callable[[], bytes],
        end: Callable[[Exception], Lost],
        unreadable: Callable[[Exception], FoveaError] | None = None,
    ) -> None:
        """`receive` blocks until an answer arrives, and raises when none can; `end` then makes the error of all calls.

        `unreadable` makes the error for an answer that cannot be unpickled; None: such an answer ends the line.
        """
        self.packing = Packing()
        self.lost: Lost | None = None
        """Set once no answer can arrive any more."""
        self._receive, self._end, self._unreadable = receive, end, unreadable
        self._numbers = count()
        self._results: dict[int, Future[Any]] = {}
        self.reader = Thread(target=self._read, name="answers of another process", daemon=True)
        """Must be started once calls may be made and answers may arrive."""

    def __bool__(self) -> bool:
        """True if a call waits for its answer."""
        return bool(self._results)

    def add(self) -> tuple[int, Future[Any]]:
        """Add a call; returns its number and a future of its result."""
        number, result = next(self._numbers), Future[Any]()
        # running futures cannot be cancelled: if a caller is cancelled, the answer still arrives
        result.set_running_or_notify_cancel()
        self._results[number] = result
        return number, result

    def fail(self, error: Exception) -> None:
        """Make all waiting calls fail with an error."""
        # two threads may come here at once
        with suppress(KeyError):
            while True:
                self._results.popitem()[1].set_exception(error)

    def _read(self) -> None:
        """Hand answers to their callers until the line ends; then make the waiting calls fail."""
        try:
            while True:
                self._take(self._receive())
        except Exception as error:  # all kinds: if this thread died silently, callers would wait forever
            # set first, for calls that are added too late to be failed below
            self.lost = self._end(error)
            self.fail(self.lost)

    def _take(self, message: bytes) -> None:
        try:
            answer: Answer = self.packing.unpack(message)
        except Exception as error:
            if self._unreadable is None:
                raise
            # the number of the call is part of the unreadable answer, so all calls fail
            return self.fail(self._unreadable(error))
        result = self._results.pop(answer.number, None)
        if result is None:  # a call that could not be sent has made all others fail
            return None
        return result.set_result(answer.value) if answer.error is None else result.set_exception(answer.error)
