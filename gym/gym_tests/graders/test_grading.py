"""Scores in a run: graders by name, limits of calls, rewards that no file holds, and rewards of turns in sums."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from threading import Event
from typing import Any

import numpy as np
import pytest

from fovea_gym.errors import DataError, ScoreError
from fovea_gym.graders.base import NoScoreError, weighted_turns
from fovea_gym.graders.grading import CallLimits, Grading, LimitedCalls
from fovea_gym.graders.reward_models import WithModelReward
from fovea_gym.types import Score, Task, Turn
from fovea_gym.utils.event_loop import gather_or_cancel, wait_for
from fovea_gym.utils.installing import pip_install
from gym_tests.bandit import BanditEnvironment
from gym_tests.grading import score_in_run
from gym_tests.tables import table

CODE = """
import sys

sys.modules["babel"] = None  # as if it were not installed

from fovea_gym.graders.by_name import grader_of
from fovea_gym.errors import MissingExtraError

for name in ("geo3k", "vqa", "shapes"):
    print(name, grader_of(name, [])("\\\\boxed{3}", {"truth": "3"}, "line 1").score)
try:
    grader_of("geospot", [])
except MissingExtraError as error:
    print(error)
"""


def test_only_geospot_needs_a_gazetteer() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["geo3k", "vqa", "shapes"], done.stderr
    assert all(float(line.split()[1]) > 0 for line in lines[:3])
    assert f"babel is not installed; {pip_install('geospot')}" in lines[3]


QUESTION = Task(id="train/0", question="?", answer="a")


@dataclass(frozen=True, slots=True)
class Says:
    """A grader of another package with one opinion, which nobody has checked."""

    opinion: Score

    async def score(self, task: Task, turns: Sequence[Turn]) -> Score:
        return self.opinion


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
        score_in_run(Grading(graders=(Says(Score(accuracy=0.0, **fields)),)), QUESTION, "so")


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
    with pytest.raises(ScoreError, match="mine raised TimeoutError: the socket timed out"):
        score_in_run(grading, TASK, "red")
    assert grader.num_calls == 1


class RaisesTwice:
    """A grader that raises for two tasks: for the second when the run has the error of the first, and cancels it."""

    def __init__(self) -> None:
        self.first_raised, self.second_runs, self.second_may_raise = Event(), Event(), Event()

    async def score(self, task: Task, turns: Sequence[Turn]) -> Score:
        if turns[-1].text == "slow":
            await asyncio.sleep(60)
        if task.id == "second":
            while not self.first_raised.is_set():
                await asyncio.sleep(0.001)
            self.second_runs.set()
            self.second_may_raise.wait(30)  # holds up the loop of the calls: the cancellation arrives with the error
        raise NoScoreError(f"raised ValueError: {task.id}")


def test_of_two_rewards_that_raise_the_second_prints_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    grader = RaisesTwice()
    grading = Grading(graders=(grader,), calls=LimitedCalls(CallLimits(name="mine", calls_at_once=4)))
    answers = [[Turn(messages=(), text=text)] for text in ("red", "slow")]

    async def scored(name: str) -> None:
        try:
            await grading.scores(replace(TASK, id=name), answers)
        except ScoreError:
            grader.first_raised.set()
            grader.second_runs.wait(30)
            raise

    with pytest.raises(ScoreError, match=r"^first: mine raised ValueError: first\b"):
        wait_for(gather_or_cancel(map(scored, ("first", "second"))))
    grader.second_may_raise.set()
    assert isinstance(grading.calls, LimitedCalls)
    grading.calls.loop.wait(asyncio.sleep(0.1))  # the second call has ended
    gc.collect()
    assert caplog.messages == []
    grading.close()


ROW = BanditEnvironment().tasks("train")[0]
BY_TURN, WHOLE = Score(reward=3, accuracy=1, turns=(1, 2)), Score(reward=0.5, accuracy=0.5)
TURNS = (Turn(messages=(), text="first"), Turn(messages=(), text="second"))


def test_a_score_of_the_whole_episode_counts_with_the_last_turn_and_turns_sum_to_the_reward() -> None:
    """With a model's share: turns of 1 and 2 at 3/4, the model's .5 at 1/4."""
    assert weighted_turns([(0.5, BY_TURN), (2, WHOLE)], 2) == (0.5, 2)
    assert weighted_turns([(1, WHOLE), (2, WHOLE)], 2) == ()
    grader = WithModelReward(own=Says(BY_TURN), models=[("judge", Says(WHOLE), 0.25)])
    score = asyncio.run(grader.score(ROW, TURNS))
    assert score.turns == (0.75, 1.625)
    assert score.reward == pytest.approx(sum(score.turns))


def test_the_limit_of_a_reward_is_that_of_a_turns() -> None:
    grading = Grading(graders=(Says(Score(reward=0, accuracy=0, turns=(2e6, -2e6))),))
    with pytest.raises(DataError, match=r"train/0: .*'second'.*2e\+06"):
        asyncio.run(grading.scores(ROW, [TURNS]))
