"""A run of a tiny model, built from settings."""

from __future__ import annotations

from pathlib import Path

from fovea.config.run import Config
from fovea.run.context import Run
from fovea.wiring.run import build

SMALL = {
    "environment": {"name": "shapes", "train_size": 12, "dev_size": 4, "test_size": 8},
    "log": {"tensorboard": False, "progress": False},
    "rollout": {"max_new_tokens": 3},
}


def run_of(folder: Path, **settings: object) -> Run:
    return build(Config.model_validate({"model": {"tiny": {}}, "run_dir": str(folder), **SMALL, **settings}))
