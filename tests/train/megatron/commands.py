"""Whole runs by Megatron in their own processes."""

from __future__ import annotations

import os
from pathlib import Path

from tests.rollout.short_runs import LIMIT_SECONDS, QUICK, TRAINS
from tests.warm import run_warm

SETTINGS = (
    *("train.backend.name=megatron", "max_steps=4", "threads=1"),
    *("rollout.prompts_per_step=4", "rollout.samples_per_prompt=3", "evaluate.every_steps=0"),
    # all rows of training are searched for images that are tested, 24,000 by default
    *("environment.train_size=64", "environment.dev_size=8"),
    *("model.tiny.num_layers=2", "model.tiny.num_kv_heads=2", *QUICK, *TRAINS),
)
TRAIN = ("tests.train.megatron.fovea_on_cpu", "train")
SHAPES = (*TRAIN, "recipes/shapes.yaml", *SETTINGS)


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "300"}


def fovea(run_dir: Path, *settings: str, limit_seconds: float = LIMIT_SECONDS) -> None:
    done = run_warm([*SHAPES, f"run_dir={run_dir}", *settings], environment(), limit_seconds)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
