"""Rewards of turns in weighted sums of scores."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from fovea.environments.graders.base import weighted_turns
from fovea.environments.graders.grading import Grading
from fovea.environments.graders.opinions import WithModelReward
from fovea.errors import DataError
from fovea.types import Score, Task, Turn

BY_TURN, WHOLE = Score(reward=3, accuracy=1, turns=(1, 2)), Score(reward=0.5, accuracy=0.5)
TASK = Task(id="train/0", question="q", answer="a")
TURNS = (Turn(messages=(), text="first"), Turn(messages=(), text="second"))


@dataclass(frozen=True, slots=True)
class Says:
    """A grader with one opinion."""

    opinion: Score

    async def score(self, task: Task, turns: Sequence[Turn]) -> Score:
        return self.opinion


def test_a_score_of_the_whole_episode_counts_with_the_last_turn() -> None:
    assert weighted_turns([(0.5, BY_TURN), (2, WHOLE)], 2) == (0.5, 2)
    assert weighted_turns([(1, WHOLE), (2, WHOLE)], 2) == ()


def test_a_models_share_leaves_turns_that_sum_to_the_reward() -> None:
    """Turns of 1 and 2 at 3/4, the model's .5 at 1/4."""
    grader = WithModelReward(own=Says(BY_TURN), models=[("judge", Says(WHOLE), 0.25)])
    score = asyncio.run(grader.score(TASK, TURNS))
    assert score.turns == (0.75, 1.625)
    assert score.reward == pytest.approx(sum(score.turns))


def test_the_limit_of_a_reward_is_that_of_a_turns() -> None:
    grading = Grading(graders=(Says(Score(reward=0, accuracy=0, turns=(2e6, -2e6))),))
    with pytest.raises(DataError, match=r"train/0: the reward of 'second' is 2e\+06, beyond 1e\+06; scale it down"):
        asyncio.run(grading.scores(TASK, [TURNS]))
