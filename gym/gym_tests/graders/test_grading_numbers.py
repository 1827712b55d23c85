"""Scores of any grader in a run: rewards beyond every float, and names of parts that no file holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from fovea_gym.errors import DataError
from fovea_gym.graders.grading import Grading
from fovea_gym.types import Score, Task, Turn
from gym_tests.grading import score_in_run
from gym_tests.tables import table

TASK = Task(id="train/0", question="?", answer="a")


@dataclass
class Gives:
    """A grader of another package, whose scores nobody has checked."""

    given: Score

    async def score(self, task: Task, turns: Sequence[Turn]) -> Score:
        return self.given


@table(
    ("fields", "message"),
    [
        ({"reward": 10**400}, r"^train/0: the reward of 'so' is 1\.00000e\+400, beyond 1e\+06; scale it down$"),
        ({"reward": -(10**5000)}, r"is -1\.00000e\+5000, beyond 1e\+06"),
        ({"reward": 1.0, "turns": (10**400,)}, r"is 1\.00000e\+400, beyond"),
        ({"reward": np.float32("nan")}, r"is nan; return a finite number$"),
        (
            {"reward": 1.0, "parts": {"caf\udce9": 1.0}},
            r"score part 'caf\\udce9' has an unpaired surrogate; rename it$",
        ),
        ({"reward": 1.0, "image_parts": ({"\ud800": 1.0},)}, r"score part '\\ud800' has an unpaired surrogate"),
    ],
)
def test_a_score_that_no_run_can_keep_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        score_in_run(Grading(graders=(Gives(Score(accuracy=0.0, **fields)),)), TASK, "so")
