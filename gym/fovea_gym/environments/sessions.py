"""The environment's side of an episode: stateless replies, or a session whose calls have limits.

Environments whose replies never wait are called on the run's event loop. All others are called on a background loop,
since an engine that computes on the run's loop would delay them.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar

from fovea_gym.environments.base import Environment, OwnReplies, Session, Split
from fovea_gym.environments.custom.checks import check_messages
from fovea_gym.errors import (
    BadRowError,
    ClusterError,
    ConfigError,
    DataError,
    FailedEpisodeError,
    FoveaError,
    OutOfMemoryError,
    ScoreError,
    SessionError,
    describe_error,
)
from fovea_gym.graders.base import LateError, NoScoreError, TryAgainError
from fovea_gym.graders.grading import CallLimits, CallThreads, LimitedCalls, called, without_ends
from fovea_gym.settings.splits import SessionLimits
from fovea_gym.tools.base import Tool
from fovea_gym.types import Message, Score, Task, Turn
from fovea_gym.utils.event_loop import BackgroundLoop

LOG = logging.getLogger(__name__)
Result = TypeVar("Result")
Make: TypeAlias = Callable[[], Awaitable[Result]]


def unreadable(session: Session, error: DataError) -> FoveaError:
    """The error for an episode whose reply cannot be rendered, such as one with a damaged picture."""
    text, reason = str(error), "reply"
    if isinstance(error, BadRowError):
        reason, text = "picture", error.problem  # without its advice, which is for rows in files
    if isinstance(session, LimitedSession):
        return session.failure(reason, text)
    return DataError(f"{text}; correct it in the environment's reply") if reason == "picture" else error


async def goes_on(session: Session, turns: Sequence[Turn]) -> bool:
    """True if the environment would reply to the last of these turns; assumed for sessions whose replies may wait."""
    return not isinstance(session, OwnReplies) or await session.reply(turns) is not None


class WaitingReplies(Session):
    """A session of stateless replies that may wait; functions that are not async are called in threads."""

    def __init__(self, reply: Callable[[Task, Sequence[Turn]], Any], task: Task, threads: CallThreads) -> None:
        self._reply = reply
        self._task = task
        self._threads = threads

    async def reply(self, turns: Sequence[Turn]) -> Sequence[Message] | None:
        messages: Sequence[Message] | None = await called(self._threads, self._reply, self._task, turns)
        return messages


class LimitedSessions(Environment):
    """An environment with sessions whose calls have the limits in its settings `session`."""

    def __init__(
        self,
        environment: Environment,
        limits: SessionLimits,
        name: str,
        *,
        settings: str = "session.",
        way_out: str = "",
        asks_score: bool = True,
    ) -> None:
        """`name` is the environment's name in messages, and `settings` the prefix of its limits' names there.

        `way_out` is further advice for code that keeps the deadline from taking effect, after the advice to fix it.
        With `asks_score=False`, graders score the episodes.
        """
        self.asks_score = asks_score
        self.inside = environment
        """The environment without limits."""
        self._limits = limits
        self._settings = settings
        self._name = name
        self.max_turns = environment.max_turns
        self.answer_end = environment.answer_end
        self.has_demonstrations = environment.has_demonstrations
        self.max_open = limits.max_concurrent
        of_calls = CallLimits(
            name=name,
            settings=settings,
            time_limit="deadline_seconds",
            calls_at_once=limits.max_concurrent,
            timeout_seconds=limits.deadline_seconds,
            may_hold_lock=True,
            way_out=way_out,
        )
        self._calls = LimitedCalls(of_calls)
        weakref.finalize(self, self._calls.loop.close)

    def without_scores(self) -> LimitedSessions:
        """A copy of this environment whose episodes are scored by graders instead of by their sessions."""
        way_out = self._calls.limits.way_out
        return LimitedSessions(
            self.inside, self._limits, self._name, settings=self._settings, way_out=way_out, asks_score=False
        )

    def tasks(self, split: Split) -> Sequence[Task]:
        return self.inside.tasks(split)

    def prompt(self, task: Task) -> Sequence[Message]:
        return self.inside.prompt(task)

    def target(self, task: Task) -> str:
        return self.inside.target(task)

    def demonstration(self, task: Task) -> Sequence[str]:
        return self.inside.demonstration(task)

    def turns_of(self, task: Task) -> int:
        return self.inside.turns_of(task)

    def tools(self, task: Task) -> Sequence[Tool]:
        return self.inside.tools(task)

    @property
    def uses_tools(self) -> bool:
        return self.inside.uses_tools

    async def open(self, task: Task, seed: int) -> LimitedSession:
        """Open a session; if that fails, FailedEpisodeError or, with `on_failure=stop`, SessionError."""
        session = LimitedSession(
            self._calls, self._limits, f"{task.id}: {self._name}", self._settings, asks_score=self.asks_score
        )
        try:
            await session.begin(partial(self.inside.open, task, seed))
        except BaseException:
            await session.close()
            raise
        return session


class LimitedSession(Session):
    """A session whose calls have deadlines, and whose failures are handled as the settings say."""

    def __init__(
        self, calls: LimitedCalls, limits: SessionLimits, name: str, settings: str, *, asks_score: bool
    ) -> None:
        self._asks_score = asks_score
        self._calls = calls
        self._limits = limits
        self._settings = settings
        self._name = name
        self._task = SessionTask(calls.loop)
        self._opened: Session | None = None

    async def begin(self, opening: Callable[[], Awaitable[Session]]) -> None:
        async def opens() -> None:
            # stored at once, so that the session is closed even if the caller was cancelled meanwhile
            self._opened = await opening()

        await self._limited("open", opens, (NoScoreError,))

    async def reply(self, turns: Sequence[Turn]) -> Sequence[Message] | None:
        """The messages of the session's reply, checked."""
        session = self._session
        # a call of a session with state may have taken effect before it failed: repeat it only on TryAgainError
        again = NoScoreError if isinstance(session, WaitingReplies) else TryAgainError
        messages = await self._limited("reply", lambda: session.reply(turns), (again,))
        if messages is not None:
            try:
                check_messages(messages, f"{self._name}.reply", ", or None to end the episode")
            except DataError as error:
                raise self.failure("reply", str(error)) from error
        return messages

    async def score(self, turns: Sequence[Turn]) -> Score | None:
        """The score that the session gives to its episode; None if it gives none."""
        session = self._session
        if not self._asks_score or not session.has_score:
            return None
        return await self._limited("score", lambda: session.score(turns), (TryAgainError,))

    async def close(self) -> None:
        """Close the session, even if the episode failed or the caller is cancelled; failures are logged as warnings."""
        try:
            await self._task.last_call(self._closes)
        except NoScoreError as error:
            LOG.warning("%s.close %s", self._name, error)

    def failure(self, reason: str, text: str) -> FoveaError:
        """The error for a failed episode, chosen by the setting `on_failure`."""
        limits = self._limits
        if limits.on_failure == "stop":
            return SessionError(f"{text}; fix it, or set {self._settings}on_failure=drop to leave such episodes out")
        return FailedEpisodeError(text, reason, limits.failure_reward if limits.on_failure == "reward" else None)

    async def _closes(self) -> None:
        session, self._opened = self._opened, None
        if session is not None:
            await self._calls.call(lambda: _of_session(session.close), 0, ())

    async def _limited(self, method: str, make: Make[Result], again: tuple[type[NoScoreError], ...]) -> Result:
        retries = self._limits.retries
        try:
            return await self._task.call(lambda: self._calls.call(lambda: _of_session(make), retries, again))
        except NoScoreError as error:
            reason = "deadline" if isinstance(error, LateError) else method
            raise self.failure(reason, f"{self._name}.{method} {error}") from error

    @property
    def _session(self) -> Session:
        assert self._opened is not None, f"{self._name} is not open"
        return self._opened


async def _of_session(make: Make[Result]) -> Result:
    """The result of the session's code; NoScoreError for any exception except those that end the run."""
    with without_ends():
        try:
            return await make()
        except (ScoreError, ConfigError, ClusterError, OutOfMemoryError, TimeoutError):
            raise
        except FoveaError as error:
            raise NoScoreError(f"failed: {error}") from error
        except Exception as error:
            raise NoScoreError(describe_error(error)) from error


class SessionTask:
    """Makes calls in one task of a background loop, for callers on other loops.

    All calls of a session run in this task, since anyio's cancel scopes (used by MCP) must be entered and left in one
    task. Cancelling a caller cancels its call, not the task.
    """

    def __init__(self, loop: BackgroundLoop) -> None:
        self._loop = loop
        self._task: asyncio.Task[None] | None = None
        self._calls: asyncio.Queue[tuple[Make[Any], asyncio.Future[Any]]] = asyncio.Queue()
        self._running: asyncio.Future[Any] | None = None

    async def call(self, make: Make[Result]) -> Result:
        """Make a call and return its result."""
        return await self._loop.run(self._ask(make))

    async def last_call(self, make: Make[Result]) -> Result:
        """Make the last call, then end the task; the call is completed even if the caller is cancelled meanwhile."""
        return await self._loop.run_to_end(self._ask_last(make))

    async def _ask_last(self, make: Make[Result]) -> Result:
        try:
            return await self._ask(make)
        finally:
            if self._task is not None:
                self._task.cancel()

    async def _ask(self, make: Make[Result]) -> Result:
        if self._task is None:
            self._task = asyncio.create_task(self._serve())
        answer: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._calls.put_nowait((make, answer))
        try:
            return await answer
        except asyncio.CancelledError:
            if self._running is answer:
                self._task.cancel()
            raise

    async def _serve(self) -> None:
        while True:
            make, answer = await self._calls.get()
            if not answer.cancelled():
                await self._answer(make, answer)

    async def _answer(self, make: Make[Any], answer: asyncio.Future[Any]) -> None:
        self._running = answer
        try:
            result = await make()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or not answer.cancelled():
                answer.cancel()
                raise
            task.uncancel()
        except Exception as error:
            if not answer.cancelled():
                answer.set_exception(error)
        else:
            if not answer.cancelled():
                answer.set_result(result)
        finally:
            self._running = None
