"""Rollouts during updates: the loop in one process with a bound of 0, and a policy and an engine in two processes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from fovea.config.loading import load_config
from fovea.loop import train
from fovea.metrics.log import read_metrics
from fovea.metrics.names import undefined
from fovea.wiring.run import build
from tests.cluster.torchrun_runs import (
    LONG,
    LONG_STEPS,
    assert_all_end,
    processes_of,
    rank_of,
    settings,
    start_on_two,
    train_on_two,
    without_transfer,
)
from tests.runs import ROOT, SMALL, final_weights, train_ahead, untimed

OVERLAP = (
    *("cluster.placement=disaggregated", "cluster.rollout_gpus=1", "rollout.max_staleness_steps=1"),
    # random weights give no right answer, and the entropy bonus trains along with groups that are all wrong
    *("checkpoint.every_steps=5", "algorithm.entropy_coef=0.1", "algorithm.max_groups_without_signal=4"),
)


def test_a_bound_of_0_gives_the_metrics_and_weights_of_the_loop_that_takes_turns(tmp_path: Path) -> None:
    """On the demo's recipe, with a dev reading and a checkpoint on the way."""
    for name, train_run in (("in_turn", train), ("ahead", train_ahead)):
        given = ["max_steps=4", "evaluate.every_steps=2", "checkpoint.every_steps=3", "log.progress=false"]
        run_dir = f"run_dir={tmp_path / name}"
        train_run(build(load_config([ROOT / "recipes/shapes.yaml"], [run_dir, *SMALL, *given, "seed=1"])))
    in_turn, ahead = untimed(tmp_path / "in_turn"), untimed(tmp_path / "ahead")
    assert ahead == [row | {"staleness/mean": 0, "staleness/max": 0} for row in in_turn]
    assert final_weights(tmp_path / "ahead", 4) == final_weights(tmp_path / "in_turn", 4)


@pytest.mark.slow
@pytest.mark.kill
def test_a_run_whose_engine_is_killed_amid_a_rollout_equals_one_that_is_not(tmp_path: Path) -> None:
    """Weights byte for byte and metrics digit for digit, so that two runs are equal as well."""
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    process = start_on_two(killed, *OVERLAP)
    (engine,) = (each for each in processes_of(killed) if rank_of(each) == "1")
    # torchrun answers the death by SIGTERM to the driver, which then, amid an update, ends saved where no checkpoint is
    # due: the next step would be drawn by those weights
    process.send_signal(signal.SIGSTOP)
    os.kill(engine, signal.SIGKILL)
    wait_until_alone(process.pid, killed)
    process.send_signal(signal.SIGCONT)
    assert_all_end(process, killed)
    assert len(read_metrics(killed)) < LONG_STEPS
    assert all(step % 5 == 0 for step in saved_steps(killed))
    for run_dir in (killed, whole):
        train_on_two(*settings("recipes/shapes.yaml", run_dir, *LONG, *OVERLAP), "resume=auto")
    rows = untimed(whole)
    assert without_transfer(killed) == without_transfer(whole)
    assert final_weights(killed, LONG_STEPS) == final_weights(whole, LONG_STEPS)
    assert [row["staleness/mean"] for row in rows] == [0, 1, 1, 1, 1] * 4
    assert undefined(key for row in read_metrics(whole) for key in row) == []
    # the engine's log-probs are the old ones
    is_exact = [row["ratio_mean"] == pytest.approx(1, abs=1e-5) for row in rows]
    assert is_exact == [row["staleness/mean"] == 0 for row in rows]


@pytest.mark.slow
@pytest.mark.kill
def test_sigterm_saves_without_what_is_drawn_ahead_and_the_run_goes_on(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start_on_two(run_dir, *OVERLAP)
    process.send_signal(signal.SIGTERM)
    assert_all_end(process, run_dir)
    steps_before = len(read_metrics(run_dir))
    assert steps_before < LONG_STEPS
    done = train_on_two(*settings("recipes/shapes.yaml", run_dir, *LONG, *OVERLAP), "resume=auto")
    assert f"resumed at step {steps_before}" in done
    rows = read_metrics(run_dir)
    assert [row["step"] for row in rows] == list(range(1, LONG_STEPS + 1))
    assert rows[steps_before]["staleness/mean"] == 0


def wait_until_alone(torchrun: int, run_dir: Path) -> None:
    """Wait until torchrun is the last process of a run; those that it has not waited for are zombies without words."""
    for _ in range(1200):
        if processes_of(run_dir) == [torchrun]:
            return
        time.sleep(0.1)
    raise AssertionError(f"the run goes on in {processes_of(run_dir)}")


def saved_steps(run_dir: Path) -> list[int]:
    return [int(each.name.removeprefix("step-")) for each in (run_dir / "checkpoints").glob("step-*")]
