"""Whole runs that draw with the engine: parity gate, steps, evaluation; kills, another process, Ctrl-C."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from fovea.metrics.log import read_metrics
from tests.cluster.ray_environment import own_ray
from tests.rollout.engines.under_test import under_test
from tests.rollout.short_runs import (
    APART,
    LIMIT_SECONDS,
    QUICK,
    TRAINS,
    check_exact,
    comparable,
    heed_ctrl_c,
    train,
)
from tests.runs import ROOT, SMALL, environment, fovea_here, untimed, wait_for_steps
from tests.saved import saved_tensors

STEPS = 4
BRIEF = (f"max_steps={STEPS}", *SMALL, *under_test().run_settings, *QUICK, *TRAINS)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    fovea_here("train", "recipes/shapes.yaml", f"run_dir={run_dir}", *BRIEF)
    return run_dir


def test_the_demo_recipe_trains(undisturbed: Path) -> None:
    check_exact(undisturbed, under_test().name, STEPS)


def started(recipe: str, run_dir: Path, *settings: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "fovea", "train", f"recipes/{recipe}.yaml", f"run_dir={run_dir}", *settings],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=heed_ctrl_c,  # noqa: PLW1509
    )


@pytest.mark.parametrize("launcher", under_test().launchers)
def test_an_engine_in_another_process_gives_the_curve_of_one_process(
    launcher: str, undisturbed: Path, tmp_path: Path
) -> None:
    if launcher == "ray":
        with own_ray() as env:
            train("shapes", tmp_path, *BRIEF, *APART, "cluster.gpus_per_node=2", env=env)
    else:
        train("shapes", tmp_path, *BRIEF, *APART, processes=2)
    for row, expected in zip(comparable(tmp_path), comparable(undisturbed), strict=True):
        assert row == pytest.approx(expected, rel=1e-5, abs=1e-6)
    check_exact(tmp_path, under_test().name, STEPS)
    # of the frozen tower nothing is sent again
    trained = saved_tensors(tmp_path / f"checkpoints/step-{STEPS}/trainable").values()
    sent = {row["transfer/weights_mib"] for row in read_metrics(tmp_path)}
    assert sent == {sum(tensor.nbytes for tensor in trained) / 2**20}


def test_a_run_whose_processes_are_killed_has_the_curve_of_one_that_is_not(undisturbed: Path, tmp_path: Path) -> None:
    """Of a trainer that is killed no process is left, and of its engine no file."""
    kills, said = under_test().processes_of_run, ""
    with started("shapes", tmp_path, *BRIEF, f"max_restarts={len(kills)}") as supervisor:
        assert supervisor.stdout is not None
        for kill in kills:
            wait_for_steps(tmp_path, 3, supervisor)
            (trainer,) = psutil.Process(supervisor.pid).children()
            below = trainer.children(recursive=True)
            hosts = (each for each in below if "fovea.rollout.sglang.host" in each.cmdline())
            folders = [Path(each.environ()["TMPDIR"]) for each in hosts]
            assert all(each.is_dir() for each in folders)
            of_kill = (each for each in below if kill in " ".join(each.cmdline()))
            (trainer if kill == "trainer" else next(of_kill)).kill()
            assert not psutil.wait_procs(below, timeout=LIMIT_SECONDS)[1], "the engine of a trainer that is gone"
            assert not any(each.exists() for each in folders)
            while "resumed at step" not in said.rpartition("starting again from the checkpoint of step")[2]:
                line = supervisor.stdout.readline()
                assert line, said
                said += line
        said += supervisor.communicate(timeout=LIMIT_SECONDS)[0]
    assert supervisor.returncode == 0, said
    assert said.count("starting again from the checkpoint of step") == len(kills)
    assert "killed by signal 9 (Killed): starting again" in said
    if len(kills) > 1:
        assert under_test().lost.partition(":")[0] in said
        assert "a worker process failed: starting again" in said
    sent = {"transfer/weights_mib": 0.0}  # a resumed engine gets all weights first
    for row, expected in zip(untimed(tmp_path), untimed(undisturbed), strict=True):
        assert row | sent == pytest.approx(expected | sent, rel=1e-5, abs=1e-6)


def test_ctrl_c_in_a_run_of_two_turns_with_adapters_leaves_no_process(tmp_path: Path) -> None:
    settings = ["model.lora.rank=4", "data.max_prompt_tokens=400", "rollout.engine.max_model_len=600"]
    with started("shapes_zoom", tmp_path, *SMALL, *under_test().run_settings, *settings, "max_steps=10000") as run:
        try:
            wait_for_steps(tmp_path, 2, run)
            engine = psutil.Process(run.pid).children(recursive=True)
            run.send_signal(signal.SIGINT)
            said, _ = run.communicate(timeout=LIMIT_SECONDS)
        finally:
            run.kill()
    assert "Traceback" not in said
    assert not psutil.wait_procs(engine, timeout=LIMIT_SECONDS)[1]
    check_exact(tmp_path, under_test().name, len(read_metrics(tmp_path)))
