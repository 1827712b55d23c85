"""A class of the user's as an environment: its rows checked, its errors named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from fovea.environments.base import Environment, Split
from fovea.environments.curriculum import Stages
from fovea.environments.custom.grader import UserGrader
from fovea.environments.graders.threads import CallThreads
from fovea.errors import DataError, named, raised
from fovea.types import Message, Task, Turn


class UserEnvironment(Environment):
    """The rows and messages of a user's object. Without a method `reply` an episode has one turn."""

    def __init__(self, user: Any, name: str) -> None:
        """`user` has the methods that `custom.loading` checks; `name` is what messages call it."""
        self._user = user
        self._name = name
        self.max_turns = getattr(user, "max_turns", 1)
        self._reply: Callable[[Task, Sequence[Turn]], Sequence[Message] | None] = getattr(user, "reply", _end)

    def tasks(self, split: Split) -> Sequence[Task]:
        with self._named("tasks", split):
            tasks: Sequence[Task] = self._user.tasks(split)
            first = tasks[0] if len(tasks) else None
        if first is None:
            raise DataError(f"{self._name}.tasks({split!r}) holds no rows; return some for every split")
        if not isinstance(first, Task):
            raise DataError(f"{self._name}.tasks({split!r}) holds {first!r:.60}; return a list of fovea.types.Task")
        return tasks

    def prompt(self, task: Task) -> Sequence[Message]:
        with self._named("prompt", task.id):
            messages: Sequence[Message] = self._user.prompt(task)
            return messages

    def reply(self, task: Task, turns: Sequence[Turn]) -> Sequence[Message] | None:
        with self._named("reply", task.id):
            messages = self._reply(task, turns)
            if messages is not None and not all(isinstance(message, Message) for message in messages):
                raise TypeError("it returned something other than a list of fovea.types.Message or None")
            return messages

    def target(self, task: Task) -> str:
        with self._named("target", task.id):
            answer: str = self._user.target(task)
            return answer

    def demonstration(self, task: Task) -> Sequence[str]:
        if not hasattr(self._user, "demonstration"):
            return (self.target(task),)
        with self._named("demonstration", task.id):
            answers: Sequence[str] = self._user.demonstration(task)
            return answers

    def _named(self, method: str, where: str) -> AbstractContextManager[None]:
        return named(lambda error: DataError(f"{where}: {self._name}.{method} {raised(error)}; fix it"))


def user_graders(user: Any, stages: Stages, name: str) -> tuple[UserGrader, ...]:
    """The graders of a user's object, one for each of its stages."""
    threads = CallThreads(name)
    scorers = [user.at(stage) for stage in range(len(stages.stages))] or [user]
    return tuple(UserGrader(scorer.score, threads) for scorer in scorers)


def _end(_task: Task, _turns: Sequence[Turn]) -> None:
    return None
