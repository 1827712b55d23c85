"""Single answers scored by a grader, from ordinary code."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from fovea_gym.graders.base import Grader
from fovea_gym.graders.grading import Grading
from fovea_gym.types import Message, Score, Task, Turn
from fovea_gym.utils.event_loop import wait_for

Result = TypeVar("Result")


def scored(graders: Sequence[Grader], task: Task, text: str, messages: tuple[Message, ...] = ()) -> Score:
    return wait_for(graders[-1].score(task, [Turn(messages=messages, text=text)]))


def score_in_run(grading: Grading, task: Task, text: str) -> Score:
    """The score of an answer in a run, with the limits of its calls."""
    (score,) = wait_for(grading.scores(task, [[Turn(messages=(), text=text)]]))
    return score


def within_a_second(call: Callable[[], Result]) -> Result:
    """The result of a call that takes less than a second of processor time in one of three tries.

    A grader that blows up is slow every time; a garbage collection of the whole suite's objects is not.
    """
    for _ in range(3):
        start = time.process_time()
        result = call()
        if time.process_time() - start < 1:
            return result
    raise AssertionError("more than a second of processor time, three times in a row")
