"""Environments from the user's classes: checks their rows, names their errors, and calls their replies and sessions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from fovea_gym.environments.base import Environment, Session, Split, defines
from fovea_gym.environments.custom.checks import (
    check_answer,
    check_demonstration,
    check_messages,
    check_task,
    check_tasks,
)
from fovea_gym.environments.custom.grader import UserGrader, checked_score
from fovea_gym.environments.sessions import WaitingReplies
from fovea_gym.environments.stages import Stages
from fovea_gym.errors import DataError, describe_error, named
from fovea_gym.graders.base import NoScoreError
from fovea_gym.graders.grading import CallThreads, called
from fovea_gym.tools.base import Tool
from fovea_gym.types import Message, Score, Task, Turn


class UserEnvironment(Environment):
    """An environment from the user's object. Without a method `reply`, an episode has one turn."""

    def __init__(self, user: Any, name: str) -> None:
        """`user` has the methods that `custom.loading` checks; `name` is its name in messages."""
        self._user = user
        self._name = name
        self.max_turns = getattr(user, "max_turns", 1)
        self.answer_end = getattr(user, "answer_end", None)
        self.has_demonstrations = getattr(user, "has_demonstrations", True)

    def tasks(self, split: Split) -> Sequence[Task]:
        with named(lambda error: DataError(f"{split}: {self._name}.tasks {describe_error(error)}; fix it")):
            tasks: Sequence[Task] = self._user.tasks(split)
            check_tasks(tasks, f"{self._name}.tasks({split!r})")
        return tasks

    def prompt(self, task: Task) -> Sequence[Message]:
        check_task(task, f"{self._name}.tasks")  # a task that is made on access was not checked before
        messages: Sequence[Message] = self._checked("prompt", check_messages, task)
        return messages

    def reply(self, task: Task, turns: Sequence[Turn]) -> Sequence[Message] | None:
        if not defines(self._user, "reply"):
            return None

        def check(messages: object, made: str) -> None:
            if messages is not None:
                check_messages(messages, made, ", or None to end the episode")

        messages: Sequence[Message] | None = self._checked("reply", check, task, turns)
        return messages

    def target(self, task: Task) -> str:
        answer: str = self._checked("target", check_answer, task)
        return answer

    def demonstration(self, task: Task) -> Sequence[str]:
        if not defines(self._user, "demonstration"):
            return (self.target(task),)
        check = partial(check_demonstration, max_turns=self.max_turns)
        answers: Sequence[str] = self._checked("demonstration", check, task)
        return answers

    def turns_of(self, task: Task) -> int:
        limit: int = self._user.turns_of(task) if defines(self._user, "turns_of") else self.max_turns
        return limit

    def tools(self, task: Task) -> Sequence[Tool]:
        tools: Sequence[Tool] = self._user.tools(task) if self.uses_tools else ()
        return tools

    @property
    def uses_tools(self) -> bool:
        return defines(self._user, "tools")

    def _checked(self, method: str, check: Callable[[Any, str], None], task: Task, *arguments: object) -> Any:
        """The checked result of the user's method for a task; DataError, which names both, if it is wrong."""
        made = f"{task.id}: {self._name}.{method}"
        with named(lambda error: DataError(f"{made} {describe_error(error)}; fix it")):
            returned = getattr(self._user, method)(task, *arguments)
            check(returned, made)
        return returned


class UserSessions(UserEnvironment):
    """An environment with sessions from the user's object: those of its `open`, or else sessions of its `reply`."""

    def __init__(self, user: Any, name: str, threads: CallThreads) -> None:
        """Functions that are not async are called in `threads`."""
        super().__init__(user, name)
        self._threads = threads

    async def open(self, task: Task, seed: int) -> Session:
        """Begin an episode; NoScoreError if the user's `open` does not return a session."""
        if not defines(self._user, "open"):
            return WaitingReplies(self._user.reply, task, self._threads)
        opened = await called(self._threads, self._user.open, task, seed)
        if not callable(getattr(opened, "reply", None)):
            raise NoScoreError(
                f"returned {type(opened).__name__}, which has no method reply; return an object with reply(turns)"
            )
        return UserSession(opened, task, self._threads)


class UserSession(Session):
    """A session from the user's object, whose methods `score` and `close` are optional."""

    def __init__(self, opened: Any, task: Task, threads: CallThreads) -> None:
        self._opened = opened
        self._task = task
        self._threads = threads

    async def reply(self, turns: Sequence[Turn]) -> Sequence[Message] | None:
        messages: Sequence[Message] | None = await called(self._threads, self._opened.reply, turns)
        return messages

    async def score(self, turns: Sequence[Turn]) -> Score | None:
        """The session's score, None if it has no method `score`; NoScoreError if it does not return a valid score."""
        if not self.has_score:
            return None
        return checked_score(await called(self._threads, self._opened.score, turns), self._task, turns)

    @property
    def has_score(self) -> bool:
        return defines(self._opened, "score")

    async def close(self) -> None:
        if hasattr(self._opened, "close"):
            await called(self._threads, self._opened.close)


def user_graders(user: Any, stages: Stages, name: str) -> tuple[UserGrader, ...]:
    """The graders of a user's object, one for each of its stages."""
    threads = CallThreads(name)
    scorers = [user.at(stage) for stage in range(len(stages.stages))] or [user]
    return tuple(UserGrader(getattr(scorer, "score", _no_score), threads) for scorer in scorers)


def _no_score(task: Task, turns: Sequence[Turn]) -> Score:
    raise NotImplementedError(
        "neither the environment nor the session of this episode has a method score; add one to either"
    )
