"""A class of the user's as an environment: its rows checked, its errors named."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from fovea.environments.base import Environment, Split
from fovea.environments.curriculum import Stages
from fovea.environments.custom.checks import check_answer, check_demonstration, check_messages, check_task, check_tasks
from fovea.environments.custom.grader import UserGrader
from fovea.environments.graders.limited_calls import CallThreads
from fovea.errors import DataError, describe_error, named
from fovea.types import Message, Score, Task, Turn


class UserEnvironment(Environment):
    """The rows and messages of a user's object. Without a method `reply` an episode has one turn."""

    def __init__(self, user: Any, name: str) -> None:
        """`user` has the methods that `custom.loading` checks; `name` is what messages call it."""
        self._user = user
        self._name = name
        self.max_turns = getattr(user, "max_turns", 1)
        self.answer_end = getattr(user, "answer_end", None)
        if hasattr(user, "tools"):
            self.tools = user.tools

    def tasks(self, split: Split) -> Sequence[Task]:
        with self._named("tasks", split):
            tasks: Sequence[Task] = self._user.tasks(split)
            check_tasks(tasks, f"{self._name}.tasks({split!r})")
        return tasks

    def prompt(self, task: Task) -> Sequence[Message]:
        check_task(task, f"{self._name}.tasks")  # it may have been made on access
        with self._named("prompt", task.id):
            messages: Sequence[Message] = self._user.prompt(task)
            check_messages(messages, self._method("prompt", task.id))
        return messages

    def reply(self, task: Task, turns: Sequence[Turn]) -> Sequence[Message] | None:
        if not hasattr(self._user, "reply"):
            return None
        with self._named("reply", task.id):
            messages: Sequence[Message] | None = self._user.reply(task, turns)
            if messages is not None:
                check_messages(messages, self._method("reply", task.id), ", or None to end the episode")
        return messages

    def target(self, task: Task) -> str:
        with self._named("target", task.id):
            answer: str = self._user.target(task)
            check_answer(answer, self._method("target", task.id))
        return answer

    def demonstration(self, task: Task) -> Sequence[str]:
        if not hasattr(self._user, "demonstration"):
            return (self.target(task),)
        with self._named("demonstration", task.id):
            answers: Sequence[str] = self._user.demonstration(task)
            check_demonstration(answers, self._method("demonstration", task.id), self.max_turns)
        return answers

    def _named(self, method: str, where: str) -> AbstractContextManager[None]:
        return named(lambda error: DataError(f"{self._method(method, where)} {describe_error(error)}; fix it"))

    def _method(self, method: str, where: str) -> str:
        return f"{where}: {self._name}.{method}"


def user_graders(user: Any, stages: Stages, name: str) -> tuple[UserGrader, ...]:
    """The graders of a user's object, one for each of its stages."""
    threads = CallThreads(name)
    scorers = [user.at(stage) for stage in range(len(stages.stages))] or [user]
    return tuple(UserGrader(getattr(scorer, "score", _no_score), threads) for scorer in scorers)


def _no_score(task: Task, turns: Sequence[Turn]) -> Score:
    raise NotImplementedError(
        "neither the environment nor the session of this episode has a method score; add one to either"
    )
