"""What dynamic sampling says that it left out: groups that agree apart from groups that came too late."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from fovea.run.rollout_step import roll_out
from fovea.types import Metrics, Score, Task, Turn
from fovea.utils.event_loop import wait_for
from tests.fakes import BanditEnvironment, bandit_run, graded

SAMPLES = 4


class ByList(BanditEnvironment):
    """Of each group in turn, whether its answers are to differ."""

    def __init__(self, differ: Sequence[bool]) -> None:
        self._scores: Iterator[float] = iter([float(d and n == 0) for d in differ for n in range(SAMPLES)])

    def score(self, task: Task, turns: Sequence[Turn]) -> Score:
        accuracy = next(self._scores)
        return Score(reward=accuracy, accuracy=accuracy)


def counts(folder: Path, *differ: bool, wanted: int = 4, max_gen_batches: int = 3) -> Metrics:
    """Without the name in front."""
    run = bandit_run(
        folder,
        algorithm={"dynamic_sampling": {"max_gen_batches": max_gen_batches}},
        rollout={"prompts_per_step": wanted, "samples_per_prompt": SAMPLES, "max_new_tokens": 1},
    )
    environment = ByList(differ)
    run = replace(run, stream=replace(run.stream, environment=environment, grading=graded(environment)))
    wait_for(run.weight_sync.push(0))
    metrics = wait_for(roll_out(run.engine, run.stream, run.config, step=0, phases=run.phases)).metrics
    return {key.removeprefix("dynamic_sampling/"): value for key, value in metrics.items()}


def test_what_agrees_is_dropped_and_what_is_over_is_left_over(tmp_path: Path) -> None:
    """3 of 4 differ, then 3 of 4 again: two more than wanted."""
    found = counts(tmp_path, True, True, False, True, False, True, True, True)
    assert found == {"batches": 2, "groups_dropped": 2, "groups_left_over": 2, "groups_missing": 0}


def test_the_two_are_not_each_other(tmp_path: Path) -> None:
    """1 of 4 differs, then all 4: one more than wanted, and 3 agreed."""
    found = counts(tmp_path, False, False, True, False, True, True, True, True)
    assert found == {"batches": 2, "groups_dropped": 3, "groups_left_over": 1, "groups_missing": 0}


def test_a_step_that_is_full_at_once_leaves_nothing(tmp_path: Path) -> None:
    assert counts(tmp_path, *[True] * 4) == {
        "batches": 1, "groups_dropped": 0, "groups_left_over": 0, "groups_missing": 0
    }  # fmt: skip


def test_past_the_bound_what_is_missing_is_said(tmp_path: Path) -> None:
    found = counts(tmp_path, *[True, False, False, False] * 2, max_gen_batches=2)
    assert found == {"batches": 2, "groups_dropped": 6, "groups_left_over": 0, "groups_missing": 2}
