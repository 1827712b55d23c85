"""Whole runs as a user starts them, in this process or in one that may be killed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager
from pathlib import Path

import torch
from typer.testing import CliRunner, Result

from fovea.cli.main import app
from fovea.loop import steps_ahead
from fovea.metrics.log import read_metrics
from fovea.report.summary import Summary
from fovea.run.context import Run
from fovea.run.lifecycle import stopping
from fovea_gym.utils.event_loop import wait_for
from tests.saved import saved_bytes
from tests.warm import WarmProcess, run_warm

ROOT = Path(__file__).parent.parent
SMALL = [
    "environment.train_size=64",
    "environment.dev_size=8",
    "environment.test_size=16",
    "evaluate.dev_size=8",
    "warmup.max_steps=4",
    "warmup.check_every_steps=2",
    "rollout.prompts_per_step=6",
    "rollout.samples_per_prompt=4",
    "log.samples_every_steps=5",
]
QUICK = [
    *(x for x in SMALL if not x.startswith("warmup.")),
    *("warmup=null", "evaluate.image_controls=false", "parity.prompts=0", "log.tensorboard=false"),
]
HASH_REWARD = "reward=tests/hash_reward.py:score"
TIMING = ("seconds/", "tokens_per_second", "samples_per_second", "tflops_per_second", "mfu", "memory/", "waits/")


def command(*arguments: str, python: str = sys.executable) -> list[str]:
    return [python, "-m", "fovea", *arguments]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def run_program(
    words: Sequence[str | Path], env: Mapping[str, str] | None = None, *, seconds: float = 240, cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """A program in a separate process to its end, with what it prints."""
    given = environment() if env is None else env
    return subprocess.run(words, cwd=cwd, env=given, capture_output=True, text=True, timeout=seconds, check=False)


def fovea(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A command in a separate process, without the seconds of its imports."""
    return run_warm(["fovea", *arguments], environment(), timeout=240)


def fovea_here(*arguments: str) -> Result:
    """A command that succeeds within this process, which spares it eight seconds of imports."""
    threads = torch.get_num_threads()
    try:
        with chdir(ROOT):
            done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    finally:
        torch.set_num_threads(threads)
    assert done.exit_code == 0, done.output
    return done


def train_shapes(run_dir: Path, *settings: str) -> Result:
    return fovea_here("train", "recipes/shapes.yaml", f"run_dir={run_dir}", *SMALL, *settings)


def train_here(recipe: str, run_dir: Path, *settings: str) -> list[dict[str, float]]:
    fovea_here("train", f"recipes/{recipe}.yaml", f"run_dir={run_dir}", *settings)
    return read_metrics(run_dir)


def train_ahead(run: Run) -> Summary:
    """The loop that samples ahead, also with a bound of 0, for which `train` takes the other one."""
    with stopping(run) as stop:
        return wait_for(steps_ahead(run, stop))


def untimed(run_dir: Path) -> list[dict[str, float]]:
    """The recorded metrics of a run without times, which differ from run to run."""
    return [{key: value for key, value in row.items() if not key.startswith(TIMING)} for row in read_metrics(run_dir)]


def final_weights(run_dir: Path, step: int) -> dict[str, bytes]:
    return saved_bytes(run_dir / "checkpoints" / f"step-{step}" / "trainable")


def kill_when_steps_are_taken(arguments: Sequence[str], run_dir: Path, steps: int) -> None:
    """SIGKILL: no handler, no flush, no goodbye."""
    process = WarmProcess(["fovea", *arguments], environment(), stdout=subprocess.DEVNULL)
    with until_killed(process):
        wait_for_steps(run_dir, steps, process)


def arguments(run_dir: Path, *settings: str) -> list[str]:
    return ["train", "recipes/shapes.yaml", f"run_dir={run_dir}", *QUICK, *settings]


@contextmanager
def going(run_dir: Path, *settings: str, steps: int) -> Iterator[subprocess.Popen[str]]:
    """A run that has taken at least so many steps; killed at the end of the block if it still goes."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with until_killed(WarmProcess(["fovea", *arguments(run_dir, *settings)], environment(), **pipes)) as process:
        wait_for_steps(run_dir, steps, process)
        yield process


@contextmanager
def until_killed(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_for_steps(run_dir: Path, steps: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 600  # a bound for a run that hangs, not for a machine that is busy
    while len(read_metrics(run_dir)) < steps:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "the run took too long to get going"
        time.sleep(0.01)
