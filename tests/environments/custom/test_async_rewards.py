"""Rewards of the user's own that are coroutines: whatever they raise is a call without a score."""

from __future__ import annotations

import asyncio

import pytest

from fovea.environments.custom.grader import UserGrader
from fovea.environments.graders.grading import Grading
from fovea.environments.graders.limited_calls import CallLimits, CallThreads, LimitedCalls
from fovea.errors import UnscoredError
from fovea.types import Task
from tests.grading import score_in_run

TASK = Task(id="first", question="what?", answer="a")


@pytest.mark.parametrize("error", [asyncio.CancelledError(), SystemExit(3), KeyboardInterrupt(), ValueError("no")])
def test_what_ends_a_loop_is_a_call_without_a_score(error: BaseException) -> None:
    async def reward(_task: object, _turns: object) -> float:
        raise error

    limits = CallLimits(name="mine.py:f", timeout_seconds=30, on_failure="drop")
    grading = Grading(graders=(UserGrader(reward, CallThreads("mine.py:f")),), calls=LimitedCalls(limits))
    for _ in range(2):  # and the next call has a loop
        with pytest.raises(UnscoredError, match=rf"mine\.py:f raised {type(error).__name__}\b"):
            score_in_run(grading, TASK, "an answer")
    grading.close()
