"""Whole runs that draw with SGLang: parity gate, steps, evaluation, Ctrl-C."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from fovea.metrics.log import read_metrics
from tests.cluster.ray_environment import own_ray
from tests.rollout.short_runs import LIMIT_SECONDS, TRAINS, check_exact, children_of, wait_for_steps
from tests.runs import ROOT, SMALL, environment, untimed

SGLANG = ["rollout.engine=sglang"]


def run_of(run_dir: Path, *more: str) -> list[str]:
    command = [sys.executable, "-m", "fovea", "train", "recipes/shapes.yaml", f"run_dir={run_dir}", "max_steps=6"]
    return [*command, *SMALL, *SGLANG, *TRAINS, "checkpoint.every_steps=2", *more]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    done = subprocess.run(
        run_of(run_dir), cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return run_dir


def test_the_demo_recipe_trains(undisturbed: Path) -> None:
    check_exact(undisturbed, "sglang", 6)


def test_a_learner_and_an_engine_on_ray_train(tmp_path: Path) -> None:
    on_two = ["cluster.gpus_per_node=2", "cluster.placement=disaggregated", "cluster.rollout_gpus=1"]
    with own_ray() as env:
        done = subprocess.run(
            run_of(tmp_path, *on_two, "max_steps=2"),
            cwd=ROOT,
            env=env,
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
            check=False,
        )
    assert done.returncode == 0, done.stderr + done.stdout
    check_exact(tmp_path, "sglang", 2)


def test_a_run_whose_engine_and_then_whose_trainer_is_killed_has_the_curve_of_one_that_is_not(
    undisturbed: Path, tmp_path: Path
) -> None:
    with subprocess.Popen(
        run_of(tmp_path, "max_restarts=2"),
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as supervisor:
        wait_for_steps(tmp_path, 3, supervisor)
        (trainer,) = children_of(supervisor.pid)
        engine = psutil.Process(trainer).children(recursive=True)
        next(each for each in engine if "scheduler" in " ".join(each.cmdline())).kill()
        said = ""
        assert supervisor.stdout is not None
        while "resumed at step" not in said:
            line = supervisor.stdout.readline()
            assert line, said
            said += line
        wait_for_steps(tmp_path, 3, supervisor)
        (trainer,) = children_of(supervisor.pid)
        engine = psutil.Process(trainer).children(recursive=True)
        host = next(each for each in engine if "fovea.rollout.sglang.host" in each.cmdline())
        folder = Path(host.cmdline()[-2])
        assert folder.is_dir()
        psutil.Process(trainer).kill()
        assert not psutil.wait_procs(engine, timeout=120)[1], "the engine of a trainer that is gone"
        assert not folder.exists()
        said += supervisor.communicate(timeout=LIMIT_SECONDS)[0]
    assert supervisor.returncode == 0, said
    assert "SGLang has ended" in said
    assert "a worker process failed: starting again from the checkpoint of step" in said
    assert "killed by signal 9 (Killed): starting again from the checkpoint of step" in said
    sent = {"transfer/weights_mib": 0.0}  # a resumed engine gets all weights first
    for row, expected in zip(untimed(tmp_path), untimed(undisturbed), strict=True):
        assert row | sent == pytest.approx(expected | sent, rel=1e-5, abs=1e-6)


def test_ctrl_c_in_a_run_of_two_turns_with_adapters_leaves_no_process(tmp_path: Path) -> None:
    settings = ["model.lora.rank=4", "data.max_prompt_tokens=400", "rollout.engine.max_model_len=600"]
    command = [sys.executable, "-m", "fovea", "train", "recipes/shapes_zoom.yaml", f"run_dir={tmp_path}"]
    with subprocess.Popen(
        [*command, *SMALL, *SGLANG, *settings, "max_steps=10000"],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as run:
        try:
            end = time.monotonic() + 280
            while run.poll() is None and not read_metrics(tmp_path):
                assert time.monotonic() < end, "no step was done"
                time.sleep(0.2)
            engines = psutil.Process(run.pid).children(recursive=True)
            assert len(engines) >= 3, "host, scheduler, detokenizer"
            run.send_signal(signal.SIGINT)
            _, errors = run.communicate(timeout=120)
        finally:
            run.kill()
    assert "Traceback" not in errors
    gone, left = psutil.wait_procs(engines, timeout=120)
    assert not left, gone
    row = read_metrics(tmp_path)[0]
    assert row["rollout_train_max"] < 2e-5
