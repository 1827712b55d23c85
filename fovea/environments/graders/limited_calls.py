"""Calls of graders that wait, for a server or for the user's code: a number of them at once, each with a timeout and
retries."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass
from threading import Thread
from typing import Literal, Protocol

from fovea.environments.graders.base import Grader, NoScoreError, TryAgainError
from fovea.errors import ScoreError, UnscoredError, describe_error, first_line, result_or_error
from fovea.types import Score, Task, Turn
from fovea.utils.event_loop import BackgroundLoop
from fovea.utils.loop_watch import LoopWatch

MAX_LATE_CALLS = 8


class BlockingCalls(Protocol):
    """Runs calls that block, one at a time or several."""

    async def run(self, call: Callable[[], object]) -> object:
        """The result of a call; NoScoreError where it raises."""
        ...


class CallThreads:
    """Threads for calls of one piece of code, each call in a separate thread; to be used from one event loop."""

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
        raise NoScoreError(describe_error(error)) from error
    return result


FIRST_PAUSE_SECONDS = 0.5
MAX_PAUSE_SECONDS = 30.0
HELD_SECONDS = 60.0
"""How long after its time limit a call may keep the event loop from running: an export or an engine's start of the same
process may hold the interpreter lock for seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLimits:
    """The limits of a grader's calls, and the words for them in messages."""

    name: str
    """The grader: `mine.py:score`, `the judge at http://localhost:8000/v1`."""
    settings: str = "reward_"
    """The settings that hold these limits, up to `timeout_seconds` and `on_failure`."""
    calls_at_once: int = 1
    timeout_seconds: float | None = 10.0
    """For one try; None for graders with a separate limit."""
    max_retries: int = 0
    """Further tries after a timeout or a TryAgainError, with growing pauses."""
    on_failure: Literal["error", "drop"] = "error"
    may_hold_lock: bool = False
    """True if the calls run code of the user's, which can keep the time limit from acting."""


class UnlimitedCalls:
    """Calls of graders that keep to their own limits, on an event loop beside the run's."""

    def __init__(self, name: str) -> None:
        self.loop = BackgroundLoop(name)

    async def score(self, grader: Grader, task: Task, turns: Sequence[Turn]) -> Score:
        """The grader's score; to be awaited on `loop`."""
        return await grader.score(task, turns)


class LimitedCalls:
    """Calls of a run's graders within shared limits."""

    def __init__(self, limits: CallLimits) -> None:
        self.limits = limits
        self._slots = asyncio.Semaphore(limits.calls_at_once)
        # a separate thread: an engine that computes on the run's loop would hold up replies until their time runs out
        self.loop = BackgroundLoop(limits.name)
        self._calling = _watch(limits).calling if limits.may_hold_lock else nullcontext

    async def score(self, grader: Grader, task: Task, turns: Sequence[Turn]) -> Score:
        """The score of the first try that gives one; to be awaited on `loop`.

        Raises ScoreError where none does, UnscoredError with `on_failure: drop`.
        """
        limits = self.limits
        for num_failed in range(1, limits.max_retries + 2):
            try:
                return await self._try(grader, task, turns)
            except TryAgainError as error:
                if num_failed > limits.max_retries:
                    raise self._failure(error, num_failed) from error
            except NoScoreError as error:
                raise self._failure(error, num_failed) from error
            await asyncio.sleep(min(FIRST_PAUSE_SECONDS * 2 ** (num_failed - 1), MAX_PAUSE_SECONDS))
        raise AssertionError("the last try returns or raises")

    async def _try(self, grader: Grader, task: Task, turns: Sequence[Turn]) -> Score:
        timeout_seconds = self.limits.timeout_seconds
        try:
            async with self._slots, asyncio.timeout(timeout_seconds) as limit:
                with self._calling():
                    return await grader.score(task, turns)
        except TimeoutError as error:
            if not limit.expired():  # the grader's own error, of a socket for instance
                raise NoScoreError(f"raised {first_line(error)}") from error
            text = f"took more than {self.limits.settings}timeout_seconds={timeout_seconds or 0:g}"
            raise TryAgainError(text) from error

    def _failure(self, error: NoScoreError, num_tries: int) -> ScoreError:
        limits = self.limits
        text = f"{limits.name} {error}" + (f" in the last of {num_tries} tries" if num_tries > 1 else "")
        if limits.on_failure == "drop":
            return UnscoredError(text)
        return ScoreError(f"{text}; fix it, or set {limits.settings}on_failure=drop to leave such groups out")


def _watch(limits: CallLimits) -> LoopWatch:
    assert limits.timeout_seconds is not None, limits.name
    seconds = limits.timeout_seconds + HELD_SECONDS
    return LoopWatch(
        seconds,
        f"error: {limits.name} has blocked this process for {seconds:g} s, and {limits.settings}timeout_seconds="
        f"{limits.timeout_seconds:g} cannot end it: it holds Python's interpreter lock, as a regular expression with "
        "nested repeats does, or is async and does not await; correct it at its line below, or set reward_in=process, "
        "where such a call can be ended, then set resume=auto",
    )
