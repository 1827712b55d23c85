"""A contextual bandit with four answers: an environment, and its grader."""

from __future__ import annotations

from collections.abc import Sequence

from fovea_gym.environments.base import Environment
from fovea_gym.graders.grading import Grading
from fovea_gym.types import Message, Score, Task, Turn

ANSWERS = ("a", "b", "c", "d")


class BanditEnvironment(Environment):
    """Environment in which the right answer of task i is i % 4, and its prompt says so."""

    def tasks(self, split: str) -> list[Task]:
        return [
            Task(
                id=f"{split}/{index}", question=ANSWERS[index % 4], answer=ANSWERS[index % 4], kind=f"kind {index % 2}"
            )
            for index in range(16)
        ]

    def prompt(self, task: Task) -> list[Message]:
        return [Message(role="user", parts=(task.question,))]

    def target(self, task: Task) -> str:
        return task.answer

    def score(self, task: Task, turns: Sequence[Turn]) -> Score:
        right = float(turns[-1].text == task.answer)
        return Score(reward=right, accuracy=right, parts={"answer": right})


class ScoreOf:
    """Grader that calls the synchronous `score` of an environment."""

    def __init__(self, environment: BanditEnvironment) -> None:
        self._environment = environment

    async def score(self, task: Task, turns: Sequence[Turn]) -> Score:
        return self._environment.score(task, turns)


def graded(environment: BanditEnvironment) -> Grading:
    return Grading(graders=(ScoreOf(environment),))
