"""Whole runs by Megatron in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.rollout.short_runs import LIMIT_SECONDS, QUICK, TRAINS

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


def fovea(run_dir: Path, *settings: str, limit_seconds: float = LIMIT_SECONDS) -> None:
    command = [sys.executable, *COMMAND, f"run_dir={run_dir}", *SETTINGS, *settings]
    done = subprocess.run(
        command, timeout=limit_seconds, capture_output=True, text=True, check=False, env=os.environ | {"COLUMNS": "300"}
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
