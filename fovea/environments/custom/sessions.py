"""Replies and sessions of a class of the user's, plain or async."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fovea.environments.base import Session
from fovea.environments.custom.environment import UserEnvironment
from fovea.environments.custom.grader import checked_score
from fovea.environments.graders.base import NoScoreError
from fovea.environments.graders.limited_calls import CallThreads
from fovea.environments.sessions import WaitingReplies, called
from fovea.types import Message, Score, Task, Turn


class UserSessions(UserEnvironment):
    """The rows, messages and replies of a user's object: of its sessions, where it has a method `open`."""

    def __init__(self, user: Any, name: str, threads: CallThreads) -> None:
        """`threads` are those in which plain functions are called."""
        super().__init__(user, name)
        self._threads = threads

    async def open(self, task: Task, seed: int) -> Session:
        """Begin an episode; NoScoreError where what the user's `open` returns is not a session."""
        if not hasattr(self._user, "open"):
            return WaitingReplies(self._user.reply, task, self._threads)
        opened = await called(self._threads, self._user.open, task, seed)
        if not callable(getattr(opened, "reply", None)):
            raise NoScoreError(
                f"returned {type(opened).__name__}, which has no method reply; return an object with reply(turns)"
            )
        session = UserSession if not hasattr(opened, "score") else ScoringUserSession
        return session(opened, task, self._threads)


class UserSession:
    """A session of the user's; its `close` may be missing."""

    def __init__(self, opened: Any, task: Task, threads: CallThreads) -> None:
        self._opened = opened
        self._task = task
        self._threads = threads

    async def reply(self, turns: Sequence[Turn]) -> Sequence[Message] | None:
        messages: Sequence[Message] | None = await called(self._threads, self._opened.reply, turns)
        return messages

    async def close(self) -> None:
        if hasattr(self._opened, "close"):
            await called(self._threads, self._opened.close)


class ScoringUserSession(UserSession):
    """A session of the user's that scores its episode."""

    async def score(self, turns: Sequence[Turn]) -> Score:
        """NoScoreError where it raises, or returns what is not a score."""
        return checked_score(await called(self._threads, self._opened.score, turns), self._task, turns)
