"""Whole runs with train.backend=megatron, by the settings alone and in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rollout.short_runs import LIMIT_SECONDS, QUICK, TRAINS, check_exact

SETTINGS = (
    "train.backend.name=megatron",
    "max_steps=4",
    "threads=1",
    "rollout.prompts_per_step=4",
    "rollout.samples_per_prompt=3",
    "evaluate.every_steps=0",
    "model.tiny.num_layers=2",
    "model.tiny.num_kv_heads=2",
    *QUICK,
    *TRAINS,
)
COMMAND = ("-m", "tests.train.megatron.fovea_on_cpu", "train", "recipes/shapes.yaml")


def fovea(run_dir: Path) -> None:
    command = [sys.executable, *COMMAND, f"run_dir={run_dir}", *SETTINGS]
    done = subprocess.run(
        command, timeout=LIMIT_SECONDS, capture_output=True, text=True, check=False, env=os.environ | {"COLUMNS": "300"}
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps in one process."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    fovea(folder)
    return folder


def test_the_engine_samples_with_the_weights_of_each_step(straight: Path) -> None:
    """The embedded engine has tensors of its own: the log-probs of every step are those of the newest weights."""
    check_exact(straight, "embedded", steps=4)
