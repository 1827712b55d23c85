"""Rewards of turns that the user's code returns."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from fovea.environments.custom.grader import checked_score, score_of
from fovea.environments.graders.base import NoScoreError
from fovea.types import Score, Turn
from tests.fakes import BanditEnvironment

TASK = BanditEnvironment().tasks("train")[0]


def test_rewards_of_turns_sum_to_the_reward() -> None:
    expected = Score(reward=0.75, accuracy=0.75, turns=(1.0, -0.25))
    turns = (Turn(messages=(), text="a"), Turn(messages=(), text="b"))
    for returned in ({"turns": [1, np.float32(-0.25)]}, {"turns": [1, -0.25], "reward": 0.75}, expected):
        assert checked_score(returned, TASK, turns) == expected
    named = score_of({"turns": [1.0], "answer": 0.5, "accuracy": 0}, num_images=1)
    assert named == Score(reward=1.0, accuracy=0.0, parts={"answer": 0.5, "accuracy": 0.0}, turns=(1.0,))
    with pytest.raises(NoScoreError, match="returned 2 rewards as turns of an episode of 1; give one each"):
        checked_score(expected, TASK, turns[:1])


@pytest.mark.parametrize(
    ("turns", "problem"),
    [
        (None, "None as turns, which is not a list with the reward of every turn"),
        ("12", "'12' as turns, which is not a list"),
        ([1, None], "None as the reward of turn 2, which is not a number"),
        ([math.nan, 1], "nan as the reward of turn 1, which is not finite"),
        ([1, 1], "a reward of 1, but turns that sum to 2; give turns without a reward"),
    ],
)
def test_rewards_of_turns_that_are_none(turns: Any, problem: str) -> None:
    for returned in (Score(reward=1.0, accuracy=1.0, turns=turns), {"reward": 1.0, "turns": turns}):
        with pytest.raises(ValueError, match=problem):
            score_of(returned, num_images=1)
