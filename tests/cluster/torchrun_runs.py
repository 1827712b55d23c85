"""Runs in several processes that torchrun starts, and their comparison with a run in one."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fovea.metrics.log import read_metrics
from fovea.metrics.names import undefined
from tests.runs import HASH_REWARD, ROOT, SMALL, environment, run_program, untimed
from tests.saved import saved_tensors
from tests.warm import run_together

ALONE = ("reused", "transfer/", "balance/", "rollout_prefill")
"""Metrics that depend on the number of processes: what a rollout leaves for the update, what is sent, and to whom; the
work of prefill is counted by an engine in the process of the run."""
ROUNDING = ("mismatch", "kl/", "importance", "weights_checksum")
"""Differences between two passes over the same tokens, which are rounding, and the bits of the weights."""
TIMED = ("seconds/", "tokens_per", "samples_per", "tflops_per", "mfu", "memory/", "waits/", *ALONE, *ROUNDING)
STEPS = 3


def torchrun(*arguments: str, processes: int = 2) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}", "-m", "fovea", *arguments]


def train_by_torchrun(*arguments: str) -> None:
    """Train on two processes to the end."""
    done = run_program(torchrun("train", *arguments), environment() | {"PYTHONFAULTHANDLER": "1"})
    assert done.returncode == 0, done.stderr + done.stdout


def train_on_two(*arguments: str) -> str:
    return train_on(2, *arguments)


def train_on(processes: int, *arguments: str) -> str:
    return run_on(processes, "fovea", "train", *arguments)


def run_on(processes: int, *words: str) -> str:
    """Run a module to the end in warm processes that have what torchrun would give its own; returns what they print."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given = [environment() | launched(rank, processes, store.port) for rank in range(processes)]
    return run_together(words, [each | {"PYTHONFAULTHANDLER": "1"} for each in given])


def launched(rank: int, processes: int, port: int) -> dict[str, str]:
    """The variables that torchrun sets for a process."""
    ranks = {f"{local}RANK": str(rank) for local in ("", "LOCAL_")}
    ranks |= {f"{local}WORLD_SIZE": str(processes) for local in ("", "LOCAL_")}
    return {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}


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
        assert theirs["mismatch/abs"] < 1e-5
        assert theirs["memory/learners_peak_gib"] > 0.1, "torch alone takes more"
    compare_weights(one, two)


def compare_weights(one: Path, two: Path) -> None:
    """The same trained weights to float32 rounding."""
    weights = [saved_tensors(folder / f"checkpoints/step-{STEPS}/trainable") for folder in (one, two)]
    assert weights[0].keys() == weights[1].keys()
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, rtol=1e-4, atol=2e-5)


LONG_STEPS = 20
"""Enough that a run is still going when it is stopped after three."""
LONG = (
    *(f"max_steps={LONG_STEPS}", "warmup=null", "model.freeze_vision_tower=false", "rollout.prompts_per_step=4"),
    *("environment.test_size=4", "checkpoint.every_steps=3", "evaluate.every_steps=0"),
)


def processes_of(run_dir: Path) -> list[int]:
    """Ids of all processes that were started with this run folder on their command line, torchrun's own included."""
    found = subprocess.run(["pgrep", "-f", str(run_dir)], capture_output=True, text=True, check=False)
    return [int(line) for line in found.stdout.split()]


def starting_on_two(run_dir: Path, *more: str) -> subprocess.Popen[bytes]:
    words = torchrun("train", *settings("recipes/shapes.yaml", run_dir, *LONG, *more))
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(words, cwd=ROOT, env=environment() | {"PYTHONFAULTHANDLER": "1"}, **quiet)


def start_on_two(run_dir: Path, *more: str) -> subprocess.Popen[bytes]:
    """A run on two processes that has taken three steps and is still going."""
    process = starting_on_two(run_dir, *more)
    for _ in range(2400):
        assert process.poll() is None, "the run ended before it was stopped"
        if (run_dir / "metrics.jsonl").exists() and len(read_metrics(run_dir)) >= 3:
            return process
        time.sleep(0.1)
    raise AssertionError("no three steps in four minutes")


def rank_of(process: int) -> str:
    variables = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    return next((each.removeprefix(b"RANK=").decode() for each in variables if each.startswith(b"RANK=")), "")


def assert_all_end(process: subprocess.Popen[bytes], run_dir: Path, seconds: int = 10) -> None:
    process.wait(120)
    for _ in range(10 * seconds):
        if not processes_of(run_dir):
            return
        time.sleep(0.1)
    raise AssertionError(f"processes left behind: {processes_of(run_dir)}")


def without_transfer(run_dir: Path) -> list[dict[str, float]]:
    """Metrics but for times and for what a resume sends anew."""
    return [{key: x for key, x in row.items() if not key.startswith("transfer/")} for row in untimed(run_dir)]
