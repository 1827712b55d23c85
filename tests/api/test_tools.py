"""Runs with tools from Python: functions are called in the episodes of a run, first in those of its warm-up."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

import fovea
from fovea_gym.environments.base import Environment, Split
from fovea_gym.errors import ConfigError
from fovea_gym.tools.session import demonstrated_call
from fovea_gym.types import Message, Score, Task, Turn
from tests.api.small import SETTINGS, rows, score

CALLS: list[str] = []


def hint(place: int) -> str:
    """Look the answer up.

    Args:
        place: Which.
    """
    CALLS.append(f"call {place}")
    return "red"


class Grader:
    async def score(self, task: Task, turns: Sequence[Turn]) -> Score:
        right = float(turns[-1].text.strip() == task.answer)
        return Score(reward=right, accuracy=right)


class Riddle(Environment):
    """The same question in all rows; its answer is to be looked up."""

    max_turns = 1
    graders = (Grader(),)

    def tasks(self, split: Split) -> Sequence[Task]:
        return [Task(id=f"{split}/{number}", question="Answer?", answer="red") for number in range(8)]

    def prompt(self, task: Task) -> Sequence[Message]:
        return [Message(role="user", parts=(task.question,))]

    def target(self, task: Task) -> str:
        return task.answer

    def demonstration(self, task: Task) -> Sequence[str]:
        return [demonstrated_call("hint", {"place": 1}), "red"]


def test_a_function_is_called_as_demonstrations_ask_for_it() -> None:
    CALLS.clear()
    warmup = {"max_steps": 1, "check_every_steps": 1, "batch_size": 2}
    settings = {**SETTINGS, "max_steps": 1, "warmup": warmup, "environment.max_tool_turns": 1}
    trainer = fovea.GRPO(environment=Riddle(), tools=[hint], run_dir="run", settings=settings)
    assert trainer.config.environment.tools == (f"python:{__name__}.hint",)
    (step,) = trainer.train().metrics
    assert (CALLS, step["step"]) == (["call 1", "call 1"], 1)


def test_a_string_in_place_of_a_list_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^tools='zoom'"):
        fovea.GRPO(rows=rows(), reward=score, tools="zoom", settings=SETTINGS)
