"""Runs that draw with vLLM in a process that does not train, against the same run in one process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fovea.metrics.log import read_metrics
from tests.cluster.ray_environment import own_ray
from tests.rollout.short_runs import LIMIT_SECONDS, QUICK, TRAINS, check_exact, children_of, comparable, wait_for_steps
from tests.runs import ROOT, SMALL, environment, untimed
from tests.saved import saved_tensors

VLLM = ("rollout.engine=vllm", "rollout.engine.enforce_eager=true", "rollout.engine.kv_cache_gib=0.25")
STEPS = 4
ELSEWHERE = ("cluster.placement=disaggregated", "cluster.rollout_gpus=1")


def command(run_dir: Path, *more: str, processes: int = 1) -> list[str]:
    launch = ["torch.distributed.run", f"--nproc-per-node={processes}", "-m", "fovea"] if processes > 1 else ["fovea"]
    arguments = ["train", "recipes/shapes.yaml", f"run_dir={run_dir}", f"max_steps={STEPS}"]
    return [sys.executable, "-m", *launch, *arguments, *SMALL, *VLLM, *QUICK, *TRAINS, *more]


def train(*arguments: str, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        list(arguments),
        cwd=ROOT,
        env=env or environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run in one process."""
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    train(*command(run_dir))
    return run_dir


@pytest.fixture(scope="module")
def ray_environment() -> Iterator[dict[str, str]]:
    with own_ray() as own:
        yield own


def test_the_demo_recipe_trains(alone: Path) -> None:
    check_exact(alone, "vllm", STEPS)


def test_an_engine_in_another_process_gives_the_curve_of_one_process(alone: Path, tmp_path: Path) -> None:
    train(*command(tmp_path, *ELSEWHERE, processes=2))
    for row, expected in zip(comparable(tmp_path), comparable(alone), strict=True):
        assert row == pytest.approx(expected, rel=1e-5, abs=1e-6)
    # absent in a step without actions to train on
    assert all(row.get("rollout_train_max", 0.0) < 2e-5 for row in read_metrics(tmp_path))
    # of the frozen tower nothing is sent again
    trained = saved_tensors(tmp_path / f"checkpoints/step-{STEPS}/trainable").values()
    sent = {row["transfer/weights_mib"] for row in read_metrics(tmp_path)}
    assert sent == {sum(tensor.nbytes for tensor in trained) / 2**20}


@pytest.mark.long
def test_a_learner_and_an_engine_on_ray_give_the_curve_of_one_process(
    alone: Path, ray_environment: dict[str, str], tmp_path: Path
) -> None:
    train(*command(tmp_path, *ELSEWHERE, "cluster.gpus_per_node=2"), env=ray_environment)
    for row, expected in zip(comparable(tmp_path), comparable(alone), strict=True):
        assert row == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_a_run_whose_engine_is_killed_is_that_of_one_that_is_not_after_its_restart(alone: Path, tmp_path: Path) -> None:
    """Of a run in one process the engine is the process itself."""
    with subprocess.Popen(
        command(tmp_path, "max_restarts=1"),
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as supervisor:
        wait_for_steps(tmp_path, 3, supervisor)
        (trainer,) = children_of(supervisor.pid)
        os.kill(trainer, signal.SIGKILL)
        said, _ = supervisor.communicate(timeout=LIMIT_SECONDS)
    assert supervisor.returncode == 0, said
    assert "starting again from the checkpoint of step 2" in said
    sent = {"transfer/weights_mib": 0.0}  # the resumed engine begins without the frozen tower
    assert [row | sent for row in untimed(tmp_path)] == [row | sent for row in untimed(alone)]


def test_rollouts_ahead_carry_the_version_that_drew_them_and_repeat(tmp_path: Path) -> None:
    ahead = (*ELSEWHERE, "rollout.max_staleness_steps=1", "checkpoint.every_steps=4")
    for name in ("first", "second"):
        train(*command(tmp_path / name, *ahead, processes=2))
    first, second = (untimed(tmp_path / name) for name in ("first", "second"))
    assert first == second
    assert [row["staleness/mean"] for row in first] == [0, 1, 1, 1]
    # the engine's log-probs are the old ones, of weights a step behind
    is_exact = [row["ratio_mean"] == pytest.approx(1, abs=1e-5) for row in first]
    assert is_exact == [True, False, False, False]
