"""Dynamic sampling: rollouts until the step is full of groups that differ, within its bound."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fovea.loop import train
from fovea.metrics.log import read_metrics
from fovea.run.lifecycle import begin
from fovea.run.rollout_step import StepRollout, roll_out
from fovea_gym.types import Score, Task, Turn
from fovea_gym.utils.event_loop import wait_for
from gym_tests.bandit import BanditEnvironment, graded
from tests.fakes import bandit_run

DYNAMIC = {"dynamic_sampling": {"max_gen_batches": 4}}


class FormatOnly(BanditEnvironment):
    def score(self, task, turns) -> Score:  # type: ignore[no-untyped-def]
        right = super().score(task, turns).accuracy
        return Score(reward=right + 0.1 * (turns[-1].text == "b"), accuracy=0.0)


def drawn(folder: Path, *, sure: float = 0.0, environment: BanditEnvironment | None = None) -> StepRollout:
    """`sure`: preference of the policy for the right answer."""
    run = bandit_run(folder, algorithm=DYNAMIC)
    if environment is not None:
        run = replace(run, stream=replace(run.stream, environment=environment, grading=graded(environment)))
    wait_for(begin(run))
    run.policy.table[:] = sure * np.eye(4)  # type: ignore[attr-defined]
    wait_for(run.weight_sync.sync(0))
    run.engine.seeds.clear()  # type: ignore[attr-defined]
    result = wait_for(roll_out(run.engine, run.stream, run.config, step=0, phases=run.phases))
    assert len(set(run.engine.seeds)) == len(result.groups), "no two groups are drawn with the same numbers"  # type: ignore[attr-defined]
    return result


def accuracies(group) -> set[float]:  # type: ignore[no-untyped-def]
    return {episode.score.accuracy for episode in group.episodes}


def test_a_step_is_filled_with_groups_that_differ(tmp_path: Path) -> None:
    result = drawn(tmp_path, sure=4.0)
    assert len(result.to_train) == 8
    assert all(accuracies(group) == {0.0, 1.0} for group in result.to_train)
    batches = result.metrics["dynamic_sampling/batches"]
    assert 1 < batches <= 4
    assert len(result.groups) == 8 * batches
    dropped, left_over = (result.metrics[f"dynamic_sampling/groups_{name}"] for name in ("dropped", "left_over"))
    assert dropped == sum(len(accuracies(group)) == 1 for group in result.groups)
    assert dropped + left_over == len(result.groups) - 8
    parted = sorted(map(id, result.to_train + result.dropped))
    assert parted == sorted(map(id, result.groups)), "every group is trained on or dropped, once"
    assert result.metrics["dynamic_sampling/groups_missing"] == 0


def test_accuracy_decides_and_not_the_reward(tmp_path: Path) -> None:
    assert drawn(tmp_path, environment=FormatOnly()).to_train == []


def test_a_run_with_it_learns_and_compares_dropped_groups_with_the_engine(tmp_path: Path) -> None:
    """In its last steps nothing is left to train on."""
    run = bandit_run(tmp_path, algorithm=DYNAMIC)
    assert train(run).final.accuracy == 1.0
    rows, batches = read_metrics(tmp_path), run.policy.batches  # type: ignore[attr-defined]
    assert max(row["dynamic_sampling/batches"] for row in rows) == 4
    assert max(row["dynamic_sampling/groups_missing"] for row in rows) == 8
    assert all(row["groups/without_signal"] == 0 for row in rows)
    for row, batch in zip(rows, batches, strict=True):
        names = ("dropped", "left_over")
        assert len(batch.left_out) == sum(row[f"dynamic_sampling/groups_{name}"] for name in names)
        assert all(sample.weight == 0 for group in batch.left_out for sample in group.samples)
    assert any(batch.left_out for batch in batches)


SAMPLES = 4


class ByList(BanditEnvironment):
    """Of each group in turn, whether its answers are to differ."""

    def __init__(self, differ: Sequence[bool]) -> None:
        self._scores: Iterator[float] = iter([float(d and n == 0) for d in differ for n in range(SAMPLES)])

    def score(self, task: Task, turns: Sequence[Turn]) -> Score:
        accuracy = next(self._scores)
        return Score(reward=accuracy, accuracy=accuracy)


@pytest.mark.parametrize(
    ("differ", "max_gen_batches", "expected"),
    [
        # 3 of 4 differ, then 3 of 4 again: two more than wanted
        ([True, True, False, True, False, True, True, True], 3, (2, 2, 2, 0)),
        # 1 of 4 differs, then all 4: one more than wanted, and 3 agreed
        ([False, False, True, False, True, True, True, True], 3, (2, 3, 1, 0)),
        ([True] * 4, 3, (1, 0, 0, 0)),
        ([True, False, False, False] * 2, 2, (2, 6, 0, 2)),
    ],
    ids=["left over", "dropped", "full at once", "missing"],
)
def test_what_agrees_is_dropped_and_what_is_over_is_left_over(
    differ: Sequence[bool], max_gen_batches: int, expected: tuple[int, ...], tmp_path: Path
) -> None:
    run = bandit_run(
        tmp_path,
        algorithm={"dynamic_sampling": {"max_gen_batches": max_gen_batches}},
        rollout={"prompts_per_step": 4, "samples_per_prompt": SAMPLES, "max_new_tokens": 1},
    )
    environment = ByList(differ)
    run = replace(run, stream=replace(run.stream, environment=environment, grading=graded(environment)))
    wait_for(run.weight_sync.sync(0))
    metrics = wait_for(roll_out(run.engine, run.stream, run.config, step=0, phases=run.phases)).metrics
    names = ("batches", "groups_dropped", "groups_left_over", "groups_missing")
    assert metrics == {f"dynamic_sampling/{name}": value for name, value in zip(names, expected, strict=True)}
