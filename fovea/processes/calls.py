"""Calls of an object in another process: the records that cross, and those that wait for an answer."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from inspect import isawaitable
from itertools import count
from operator import attrgetter
from typing import Any, TypeAlias

from fovea.processes.messages import Packing, Share


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


class PendingCalls:
    """Calls that wait for their answers, by number, and the encoding of the caller's end of the connection."""

    def __init__(self) -> None:
        self.packing = Packing()
        self._numbers = count()
        self._results: dict[int, Future[Any]] = {}

    def __bool__(self) -> bool:
        return bool(self._results)

    def add(self) -> tuple[int, Future[Any]]:
        """Number of a new call, and its result to come."""
        number, result = next(self._numbers), Future[Any]()
        # a caller that is cancelled waits no longer, but its answer still arrives
        result.set_running_or_notify_cancel()
        self._results[number] = result
        return number, result

    def take(self, message: bytes) -> None:
        """Hand an answer to its caller; raises what an unreadable message raises."""
        answer: Answer = self.packing.unpack(message)
        result = self._results.pop(answer.number, None)
        if result is None:
            # a call that could not be sent has failed all others
            return
        if answer.error is None:
            result.set_result(answer.value)
        else:
            result.set_exception(answer.error)

    def fail(self, error: Exception) -> None:
        """Raise an error wherever a result is waited for."""
        # two threads may come here at once
        with suppress(KeyError):
            while True:
                self._results.popitem()[1].set_exception(error)
