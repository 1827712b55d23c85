"""Short runs of models of other families than Qwen-VL's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from fovea.commands.exporting.export import export
from fovea.config.loading import load_config
from fovea.config.run import Config
from fovea.loop import train
from fovea.metrics.log import read_metrics
from fovea.wiring.run import build


def run_settings(folder: Path, model: Path, **settings: object) -> Config:
    sizes = {"environment.train_size": 64, "environment.dev_size": 8, "environment.test_size": 8}
    rollout = {"rollout.prompts_per_step": 4, "rollout.samples_per_prompt": 4}
    warmup = {"warmup.max_steps": 2, "warmup.check_every_steps": 2}
    places = {"run_dir": str(folder), "model.tiny": None, "model.path": str(model)}
    steps = {"max_steps": 3, "checkpoint.every_steps": 3, "algorithm.max_groups_without_signal": 4}
    quiet = {"log.tensorboard": False, "log.progress": False}
    overrides = {**places, **sizes, **rollout, **warmup, **steps, **quiet, **settings}
    recipe = Path(__file__).parents[1] / "recipes" / "shapes.yaml"
    return load_config([recipe], [f"{key}={json.dumps(value)}" for key, value in overrides.items()])


def train_and_export(run_dir: Path, out: Path, model: Path, settings: Mapping[str, object]) -> None:
    """Three steps from a model folder, through the parity gate, and an export with the trainer's log-probs."""
    train(build(run_settings(run_dir, model, **settings)))
    metrics = read_metrics(run_dir)
    assert [row["step"] for row in metrics] == [1, 2, 3]
    assert all(row["grad_norm"] > 0 for row in metrics)
    assert json.loads((run_dir / "parity.json").read_text())["passed"]
    limit = 0.3 if "model.dtype" in settings else 1e-4
    assert export(run_dir, out).max_logprob_difference < limit
