"""Runs in two processes started by torchrun, against the same runs in one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from fovea.metrics.log import read_metrics
from fovea.metrics.names import undefined
from tests.saved import saved_tensors
from tests.test_runs import ROOT, SMALL, environment, fovea_here, untimed

ALONE = ("reused", "transfer/", "balance/ranks")
"""Metrics that depend on the number of processes: what a rollout leaves for the update, what is sent, and to whom."""
ROUNDING = ("rollout_train", "kl/", "importance", "weights_checksum")
"""Differences between two passes over the same tokens, which are rounding, and the bits of the weights."""
TIMED = ("seconds/", "tokens_per", "samples_per", "tflops_per", "mfu", "memory/", *ALONE, *ROUNDING)
STEPS = 3
HASH_REWARD = "reward=tests/hash_reward.py:score"


def torchrun(*arguments: str, processes: int = 2) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}", "-m", "fovea", *arguments]


def train_on_two(*arguments: str) -> subprocess.CompletedProcess[str]:
    return train_on(2, *arguments)


def train_on(processes: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        torchrun("train", *arguments, processes=processes),
        cwd=ROOT,
        env=environment() | {"PYTHONFAULTHANDLER": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done


def settings(recipe: str, run_dir: Path, *more: str) -> list[str]:
    given = (f"run_dir={run_dir}", *SMALL, HASH_REWARD, f"max_steps={STEPS}", "evaluate.image_controls=false")
    return [recipe, *given, *more]


def compare(one: Path, two: Path) -> None:
    """Every metric to 5 digits, but for times and rounding; the same trained weights to float32 rounding."""
    alone, together = read_metrics(one), read_metrics(two)
    assert [row["step"] for row in together] == [row["step"] for row in alone] == list(range(1, STEPS + 1))
    assert undefined(key for row in together for key in row) == []
    assert all(row["groups/with_signal"] > 0 for row in alone), "only entropy was trained"
    for mine, theirs in zip(alone, together, strict=True):
        expected = {key: value for key, value in mine.items() if not key.startswith(TIMED)}
        assert {key: theirs[key] for key in expected} == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert theirs["rollout_train_abs"] < 1e-5
        assert theirs["memory/learners_peak_gib"] > 0.1, "torch alone takes more"
    weights = [saved_tensors(folder / f"checkpoints/step-{STEPS}/trainable") for folder in (one, two)]
    assert weights[0].keys() == weights[1].keys()
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, rtol=1e-4, atol=2e-5)


CASES = {
    "grpo, trained tower": ("recipes/shapes.yaml", "model.freeze_vision_tower=false"),
    "ppo": ("recipes/shapes_ppo.yaml", "rollout.samples_per_prompt=2", "algorithm.minibatches=2"),
    "lora, kl": ("recipes/shapes.yaml", "warmup=null", "model.lora={rank: 4}", "algorithm.kl={coef: 0.05}"),
    "two turns": ("recipes/shapes_zoom.yaml",),
}


def test_two_processes_train_by_ppo_as_one(tmp_path: Path) -> None:
    compare_runs("ppo", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", [name for name in CASES if name != "ppo"])
def test_two_processes_train_as_one(case: str, tmp_path: Path) -> None:
    compare_runs(case, tmp_path)


def compare_runs(case: str, tmp_path: Path) -> None:
    recipe, *more = CASES[case]
    fovea_here("train", *settings(recipe, tmp_path / "one", *more))
    train_on_two(*settings(recipe, tmp_path / "two", *more))
    compare(tmp_path / "one", tmp_path / "two")


PLACEMENTS = {
    "disaggregated": (2, "cluster.placement=disaggregated"),
    "hybrid": (3, "cluster.placement=hybrid", "model.lora={rank: 4}", "warmup=null"),
}
"""Number of processes, the last of which holds an engine alone, and settings."""


@pytest.mark.slow
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_processes_with_an_engine_alone_train_as_one(placement: str, tmp_path: Path) -> None:
    processes, setting, *more = PLACEMENTS[placement]
    fovea_here("train", *settings("recipes/shapes.yaml", tmp_path / "one", *more))
    train_on(processes, *settings("recipes/shapes.yaml", tmp_path / "two", setting, "cluster.rollout_gpus=1", *more))
    compare(tmp_path / "one", tmp_path / "two")
    # of the frozen tower, and with LoRA of all but the adapters, nothing is sent again
    trained = saved_tensors(tmp_path / f"two/checkpoints/step-{STEPS}/trainable").values()
    sent = {row["transfer/weights_mib"] for row in read_metrics(tmp_path / "two")}
    assert sent == {sum(tensor.nbytes for tensor in trained) / 2**20}


LONG_STEPS = 20
"""Enough that a run is still going when it is stopped after three."""
LONG = (
    f"max_steps={LONG_STEPS}",
    "warmup=null",
    "model.freeze_vision_tower=false",
    "rollout.prompts_per_step=4",
    "environment.test_size=4",
    "checkpoint.every_steps=3",
    "evaluate.every_steps=0",
)


def processes_of(run_dir: Path) -> list[int]:
    """Ids of all processes that were started with this run folder on their command line, torchrun's own included."""
    found = subprocess.run(["pgrep", "-f", str(run_dir)], capture_output=True, text=True, check=False)
    return [int(line) for line in found.stdout.split()]


def start_on_two(run_dir: Path, *more: str) -> subprocess.Popen[bytes]:
    """A run on two processes that has taken three steps and is still going."""
    process = subprocess.Popen(
        torchrun("train", *settings("recipes/shapes.yaml", run_dir, *LONG, *more)),
        cwd=ROOT,
        env=environment() | {"PYTHONFAULTHANDLER": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    for _ in range(2400):
        assert process.poll() is None, "the run ended before it was stopped"
        if (run_dir / "metrics.jsonl").exists() and len(read_metrics(run_dir)) >= 3:
            return process
        time.sleep(0.1)
    raise AssertionError("no three steps in four minutes")


def rank_of(process: int) -> str:
    variables = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    return next((each.removeprefix(b"RANK=").decode() for each in variables if each.startswith(b"RANK=")), "")


def assert_all_end(process: subprocess.Popen[bytes], run_dir: Path) -> None:
    process.wait(120)
    for _ in range(100):
        if not processes_of(run_dir):
            return
        time.sleep(0.1)
    raise AssertionError(f"processes left behind: {processes_of(run_dir)}")


@pytest.mark.slow
def test_a_killed_worker_ends_the_run_which_goes_on_as_if_it_had_not(tmp_path: Path) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    process = start_on_two(killed)
    (worker,) = (each for each in processes_of(killed) if rank_of(each) == "1")
    os.kill(worker, signal.SIGKILL)
    assert_all_end(process, killed)
    steps_before = len(read_metrics(killed))
    assert steps_before < LONG_STEPS
    for run_dir in (killed, whole):
        train_on_two(*settings("recipes/shapes.yaml", run_dir, *LONG), "resume=auto")
    # but for what a resume sends for its parity gate
    sent = "transfer/images_mib"
    assert [row | {sent: 0} for row in untimed(killed)] == [row | {sent: 0} for row in untimed(whole)]


@pytest.mark.slow
def test_sigterm_saves_on_two_processes_and_one_goes_on(tmp_path: Path) -> None:
    process = start_on_two(tmp_path / "run")
    process.send_signal(signal.SIGTERM)
    assert_all_end(process, tmp_path / "run")
    steps_before = len(read_metrics(tmp_path / "run"))
    assert steps_before < LONG_STEPS
    done = fovea_here("train", *settings("recipes/shapes.yaml", tmp_path / "run", *LONG), "resume=auto")
    assert f"resumed at step {steps_before}" in done.stdout
    assert len(read_metrics(tmp_path / "run")) == LONG_STEPS
