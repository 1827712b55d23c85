"""Scoring of a run's answers: the only place that calls graders and handles their failures.

From the outside in: `Grading` calls the grader of a stage and checks its reward; `LimitedCalls` adds a time limit,
retries and a limit on concurrent calls, for graders that wait and for sessions; `CallThreads` runs blocking user code
in threads.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from decimal import Decimal
from threading import Thread
from typing import Any, Literal, Protocol, TypeVar

from fovea_gym.errors import (
    DataError,
    FailedEpisodeError,
    ScoreError,
    UnscoredError,
    describe_error,
    first_line,
    result_or_error,
)
from fovea_gym.graders.base import Grader, LateError, NoScoreError, TryAgainError
from fovea_gym.graders.reward_models import GivenScore, beside
from fovea_gym.types import Score, Task, Turn
from fovea_gym.utils.event_loop import BackgroundLoop
from fovea_gym.utils.loop_watch import LoopWatch

REWARD_LIMIT = 1e6
"""Magnitude above which a reward is an error: it would dominate all others, and its square may not be finite."""
FIRST_PAUSE_SECONDS = 0.5
MAX_PAUSE_SECONDS = 30.0
HELD_SECONDS = 60.0
"""Seconds beyond its time limit for which a call may block the event loop; an export or the start of an engine in this
process may hold the interpreter lock for seconds."""
MAX_LATE_CALLS = 8
Result = TypeVar("Result")


class Closes(Protocol):
    """A client to close at the end of the run."""

    async def aclose(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Grading:
    """A run's graders, with the limits of their calls and the handling of answers that they cannot score."""

    graders: tuple[Grader, ...]
    """One grader per stage of the curriculum, or one for all stages; the last one scores held-out rows."""
    calls: LimitedCalls | UnlimitedCalls | None = None
    """Limits for graders that wait; None if no grader waits: they are awaited in turn, without a task or a thread."""
    clients: tuple[Closes, ...] = ()
    """Clients with connections that the graders use on the loop of their calls."""
    parts: tuple[Grading, ...] = ()
    """Gradings that these graders call; they are closed together with this one."""

    @property
    def waits(self) -> bool:
        """True if some grader may wait, and so may fail to score an answer."""
        return self.calls is not None or any(part.waits for part in self.parts)

    @property
    def drops_completions(self) -> bool:
        """True if a single completion without a score may be dropped from its group."""
        own = isinstance(self.calls, LimitedCalls) and self.calls.limits.on_failure == "drop_completion"
        return own or any(part.drops_completions for part in self.parts)

    def at(self, stage: int) -> Grading:
        """A copy with only the grader of a stage of the curriculum; 0 is the first stage."""
        return replace(self, graders=(self.graders[stage],)) if len(self.graders) > 1 else self

    def beside(self, score: Score) -> Grading:
        """The grading of an episode whose session returned this score, which replaces the environment's graders."""
        given = GivenScore(score)
        grader = beside(self.graders[-1], given)
        return Grading(graders=(given,)) if grader is given else replace(self, graders=(grader,))

    def close(self) -> None:
        """Close the clients and stop the thread in which waiting graders are called, including those of the parts."""
        for part in self.parts:
            part.close()
        if self.calls is not None:
            self.calls.loop.close(*(client.aclose for client in self.clients))

    async def scores(self, task: Task, answers: Sequence[Sequence[Turn]]) -> list[Score]:
        """The scores of episodes of one task; ScoreError, UnscoredError to drop them, or DataError for bad rewards."""
        if not self.waits:
            return [await self._score(task, turns) for turns in answers]

        async def side_by_side() -> list[Score]:
            return await asyncio.gather(*(self._score(task, turns) for turns in answers))

        return await (side_by_side() if self.calls is None else self.calls.loop.run(side_by_side()))

    async def _score(self, task: Task, turns: Sequence[Turn]) -> Score:
        grader = self.graders[-1]
        try:
            score = await (self.calls.score(grader, task, turns) if self.calls else grader.score(task, turns))
        except FailedEpisodeError as error:
            raise FailedEpisodeError(f"{task.id}: {error}", error.reason, error.reward) from error
        except ScoreError as error:
            raise type(error)(f"{task.id}: {error}") from error
        return self.checked(task, turns, score)

    def checked(self, task: Task, turns: Sequence[Turn], score: Score) -> Score:
        """The given score; DataError for a reward that is not finite or beyond the limit."""
        if score.turns and len(score.turns) != len(turns):
            raise DataError(
                f"{task.id}: {len(score.turns)} turn rewards for an episode of {len(turns)}; give one for each turn"
            )
        for reward in (score.reward, *score.turns):
            if not abs(reward) <= REWARD_LIMIT:
                # an int may be too large for a float and for its conversion to text
                is_whole = isinstance(reward, int)
                is_large, size = is_whole or math.isfinite(reward), Decimal(reward) if is_whole else reward
                problem = f", beyond {REWARD_LIMIT:g}; scale it down" if is_large else "; return a finite number"
                raise DataError(f"{task.id}: the reward of {turns[-1].text[:80]!r} is {size:.6g}{problem}")
        for name in (name for parts in (score.parts, *score.image_parts) for name in parts):
            if any("\ud800" <= character <= "\udfff" for character in name):
                raise DataError(f"{task.id}: the name of score part {name!r:.60} has an unpaired surrogate; rename it")
        return score


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLimits:
    """The limits of the calls of a grader or of sessions, and their names in messages."""

    name: str
    """The grader's name: `mine.py:score`, `the judge at http://localhost:8000/v1`."""
    settings: str = ""
    """Prefix of the names of these limits in errors, such as `judge.` or `reward_`."""
    time_limit: str = "timeout_seconds"
    """Name of the time limit's setting, without the prefix."""
    calls_at_once: int = 1
    timeout_seconds: float | None = 10.0
    """Time limit of one try; None for graders that have their own limit."""
    max_retries: int = 0
    """Retries after a timeout or a TryAgainError, with growing pauses."""
    on_failure: Literal["error", "drop", "drop_completion"] = "error"
    may_hold_lock: bool = False
    """True if the calls run user code, which can block the time limit by holding the interpreter lock."""
    way_out: str = ""
    """Further advice for code that blocks the time limit, appended to the advice to correct it."""

    @property
    def time_setting(self) -> str:
        """The full name of the setting of the time limit."""
        return f"{self.settings}{self.time_limit}"


class UnlimitedCalls:
    """Calls of graders that have their own limits, on an event loop separate from the run's."""

    def __init__(self, name: str) -> None:
        self.loop = BackgroundLoop(name)

    async def score(self, grader: Grader, task: Task, turns: Sequence[Turn]) -> Score:
        """The grader's score; to be awaited on `loop`."""
        return await grader.score(task, turns)


class LimitedCalls:
    """Calls of a run's graders under shared limits."""

    def __init__(self, limits: CallLimits) -> None:
        self.limits = limits
        self._slots = asyncio.Semaphore(limits.calls_at_once)
        # a separate thread: an engine that computes on the run's loop would delay replies beyond their time limit
        self.loop = BackgroundLoop(limits.name)
        self._calling = _watch(limits).calling if limits.may_hold_lock else nullcontext

    async def score(self, grader: Grader, task: Task, turns: Sequence[Turn]) -> Score:
        """The score of the first successful try, awaited on `loop`; ScoreError or UnscoredError if all tries fail.

        The UnscoredError drops the group; if it is a FailedEpisodeError, it drops only the completion.
        """
        try:
            return await self.call(
                lambda: grader.score(task, turns), self.limits.max_retries, (LateError, TryAgainError)
            )
        except NoScoreError as error:
            text = f"{self.limits.name} {error}"
            if self.limits.on_failure == "drop":
                raise UnscoredError(text) from error
            if self.limits.on_failure == "drop_completion":
                raise FailedEpisodeError(text, "score") from error
            fix = f"fix it, or set {self.limits.settings}on_failure=drop to leave such groups out"
            raise ScoreError(f"{text}; {fix}") from error

    async def call(
        self, make: Callable[[], Awaitable[Result]], max_retries: int, again: tuple[type[NoScoreError], ...]
    ) -> Result:
        """The result of the first successful try, awaited on `loop`; errors of the types in `again` are retried."""
        for num_failed in range(1, max_retries + 2):
            try:
                return await self._try(make)
            except NoScoreError as error:
                if num_failed > max_retries or not isinstance(error, again):
                    tries = f" in the last of {num_failed} tries" if num_failed > 1 else ""
                    raise type(error)(f"{error}{tries}") from error
            await asyncio.sleep(min(FIRST_PAUSE_SECONDS * 2 ** (num_failed - 1), MAX_PAUSE_SECONDS))
        raise AssertionError("the last try returns or raises")

    async def _try(self, make: Callable[[], Awaitable[Result]]) -> Result:
        timeout_seconds = self.limits.timeout_seconds
        try:
            async with self._slots, asyncio.timeout(timeout_seconds) as limit:
                with self._calling():
                    return await make()
        except TimeoutError as error:
            if not limit.expired():  # raised by the called code, for instance by a socket
                raise NoScoreError(f"raised {first_line(error)}") from error
            raise LateError(f"took more than {self.limits.time_setting}={timeout_seconds or 0:g}") from error


def _watch(limits: CallLimits) -> LoopWatch:
    assert limits.timeout_seconds is not None, limits.name
    seconds = limits.timeout_seconds + HELD_SECONDS
    return LoopWatch(
        seconds,
        f"error: {limits.name} has blocked this process for {seconds:g} s, and {limits.time_setting}="
        f"{limits.timeout_seconds:g} cannot end it: it holds Python's interpreter lock, as a regular expression with "
        f"nested repeats does, or is async and does not await; correct it at its line below{limits.way_out}",
    )


@dataclass(frozen=True, slots=True)
class LimitedGrader:
    """A grader with its own limits for its calls."""

    grader: Grader
    calls: LimitedCalls

    async def score(self, task: Task, turns: Sequence[Turn]) -> Score:
        return await self.calls.score(self.grader, task, turns)


class BlockingCalls(Protocol):
    """Runs blocking calls, one at a time or several at once."""

    async def run(self, call: Callable[[], object]) -> object:
        """The result of a call; NoScoreError if it raises."""
        ...


class CallThreads:
    """Runs calls of one piece of code, each in a separate thread; to be used from a single event loop."""

    def __init__(
        self, name: str, *, setting: str = "reward_timeout_seconds", max_late_calls: int = MAX_LATE_CALLS
    ) -> None:
        """`setting` is the name of the time limit after which the caller abandons a call."""
        self._name = name
        self._setting = setting
        self._max_late_calls = max_late_calls
        self._late: list[Thread] = []

    async def run(self, call: Callable[[], object]) -> object:
        """The result of a call. NoScoreError if it raises, ScoreError if too many abandoned calls still run."""
        done: Future[tuple[object, BaseException | None]] = Future()
        done.set_running_or_notify_cancel()  # so that a timeout cannot cancel the future while the thread uses it
        # a daemon thread, so that a call that never ends does not keep the process alive
        thread = Thread(target=lambda: done.set_result(result_or_error(call)), name=self._name, daemon=True)
        thread.start()
        try:
            result, error = await asyncio.wrap_future(done)
        except asyncio.CancelledError:
            self._late = [each for each in self._late if each.is_alive()] + [thread]
            if len(self._late) < self._max_late_calls:
                raise
            raise ScoreError(
                f"{len(self._late)} calls of {self._name} still run after {self._setting} each, and a thread cannot be "
                f"stopped; make it return, or raise {self._setting}"
            ) from None
        return result_of(result, error)


async def called(threads: BlockingCalls, function: Callable[..., Any], *arguments: object) -> Any:
    """The result of a user function, which is awaited if it is async and else called in a thread."""
    if inspect.iscoroutinefunction(function):
        return await function(*arguments)
    return await threads.run(lambda: function(*arguments))


@contextmanager
def without_ends() -> Iterator[None]:
    """Convert errors of awaited code that would end its event loop, or look like its cancellation, to NoScoreError."""
    try:
        yield
    except (asyncio.CancelledError, SystemExit, KeyboardInterrupt) as error:
        running = asyncio.current_task()
        if running is not None and running.cancelling():  # cancelled by the time limit or at the end of the run
            raise
        raise NoScoreError(describe_error(error)) from error


def result_of(result: object, error: BaseException | None) -> object:
    """The result of a call; NoScoreError if the call raised."""
    if isinstance(error, TryAgainError):
        raise error
    if error is not None:
        raise NoScoreError(describe_error(error)) from error
    return result
