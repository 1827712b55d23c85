"""Dynamic sampling: rollouts until the step is full of groups that differ, within its bound."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from fovea.loop import train
from fovea.metrics.log import read_metrics
from fovea.run.lifecycle import begin
from fovea.run.rollout_step import StepRollout, roll_out
from fovea.types import Metrics, Score, Task, Turn
from fovea.utils.event_loop import wait_for
from tests.fakes import BanditEnvironment, bandit_run, graded

DYNAMIC = {"dynamic_sampling": {"max_gen_batches": 4}}


class FormatOnly(BanditEnvironment):
    """The reward of wrong answers differs, their accuracy does not."""

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
    wait_for(run.weight_sync.push(0))
    run.engine.seeds.clear()  # type: ignore[attr-defined]
    result = wait_for(roll_out(run.engine, run.stream, run.config, step=0, phases=run.phases))
    assert len(set(run.engine.seeds)) == len(result.groups), "no two groups are drawn with the same numbers"  # type: ignore[attr-defined]
    return result


def accuracies(group) -> set[float]:  # type: ignore[no-untyped-def]
    return {episode.score.accuracy for episode in group.episodes}


def test_a_step_is_filled_with_groups_that_differ(tmp_path: Path) -> None:
    """A policy that is nearly sure: most groups of 8 are all right, and several rollouts are needed."""
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


def test_past_the_bound_a_step_takes_what_there_is_and_says_so(tmp_path: Path) -> None:
    result = drawn(tmp_path, sure=50.0)
    assert result.to_train == []
    assert result.metrics == {
        "dynamic_sampling/batches": 4,
        "dynamic_sampling/groups_dropped": 32,
        "dynamic_sampling/groups_left_over": 0,
        "dynamic_sampling/groups_missing": 8,
    }


def test_accuracy_decides_and_not_the_reward(tmp_path: Path) -> None:
    assert drawn(tmp_path, environment=FormatOnly()).to_train == []


def test_a_run_with_it_learns_and_a_step_without_a_group_goes_by(tmp_path: Path) -> None:
    summary = train(bandit_run(tmp_path, algorithm=DYNAMIC))
    assert summary.final.accuracy == 1.0
    rows = read_metrics(tmp_path)
    assert max(row["dynamic_sampling/batches"] for row in rows) == 4
    assert all(row["groups/without_signal"] == 0 for row in rows)


def test_dropped_groups_reach_the_update_to_be_compared_with_the_engine_and_carry_no_weight(tmp_path: Path) -> None:
    run = bandit_run(tmp_path, algorithm=DYNAMIC)
    train(run)
    batches = run.policy.batches  # type: ignore[attr-defined]
    for row, batch in zip(read_metrics(tmp_path), batches, strict=True):
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
