"""Settings of short runs of models without a fast path."""

from __future__ import annotations

import json
from pathlib import Path

from fovea.config.loading import load_config
from fovea.config.run import Config


def run_settings(folder: Path, model: Path, **settings: object) -> Config:
    overrides = {
        "run_dir": str(folder),
        "max_steps": 3,
        "model.tiny": None,
        "model.path": str(model),
        "environment.train_size": 64,
        "environment.dev_size": 8,
        "environment.test_size": 8,
        "warmup.max_steps": 2,
        "warmup.check_every_steps": 2,
        "rollout.prompts_per_step": 4,
        "rollout.samples_per_prompt": 4,
        "algorithm.max_groups_without_signal": 4,
        "checkpoint.every_steps": 3,
        "log.tensorboard": False,
        "log.progress": False,
        **settings,
    }
    recipe = Path(__file__).parents[1] / "recipes" / "shapes.yaml"
    return load_config([recipe], [f"{key}={json.dumps(value)}" for key, value in overrides.items()])
