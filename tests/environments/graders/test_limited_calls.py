"""Whose timeout it is: of the limits, or of a connection that the grader holds."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from fovea.environments.graders.grading import Grading
from fovea.environments.graders.limited_calls import CallLimits, LimitedCalls
from fovea.errors import ScoreError
from fovea.types import Score, Task, Turn
from tests.grading import score_in_run

TASK = Task(id="t", question="What colour?", answer="red", kind="colour")


class LosesItsConnection:
    """A grader whose socket gives up before the limits do."""

    def __init__(self) -> None:
        self.num_calls = 0

    async def score(self, task: Task, turns: Sequence[Turn]) -> Score:
        self.num_calls += 1
        raise TimeoutError("the socket timed out")


def test_a_timeout_that_a_grader_raises_is_not_taken_for_that_of_its_limits() -> None:
    grader = LosesItsConnection()
    grading = Grading(graders=(grader,), calls=LimitedCalls(CallLimits(name="mine", timeout_seconds=60, max_retries=3)))
    with pytest.raises(ScoreError, match="mine raised TimeoutError: the socket timed out; fix it"):
        score_in_run(grading, TASK, "red")
    assert grader.num_calls == 1
