"""A run on shapes with levels, comparisons of two images and scenes in words."""

from __future__ import annotations

from pathlib import Path

from fovea.config.run import Config
from fovea.data.order import Order
from fovea.loop import train
from fovea.metrics.log import read_metrics
from fovea.wiring.run import build
from fovea_gym.rows.tasks import kinds_of


def test_a_run_mixes_all_of_them(tmp_path: Path) -> None:
    scenes = {"level": [1, 2, 3], "comparison_share": 0.3, "text_share": 0.2}
    config = Config.model_validate(
        {
            **{"run_dir": str(tmp_path / "run"), "max_steps": 2, "threads": 1, "model": {"tiny": {}}},
            "environment": {**scenes, "train_size": 60, "dev_size": 20, "test_size": 20},
            "warmup": {"max_steps": 2, "batch_size": 8, "check_every_steps": 2},
            "evaluate": {"dev_size": 10, "shared_images": "forbid"},
            "rollout": {"prompts_per_step": 12, "samples_per_prompt": 4, "max_new_tokens": 8},
            "curriculum": {"starts": [1], "level_weights": [{"2": 0, "3": 0}, {}]},
        }
    )
    run = build(config)
    batch = run.sources.train.take(Order(kinds_of(run.sources.train.tasks), weights={}, seed=0), 12)
    assert {len(each.prompt.images) for each in batch} == {0, 1, 2}
    train(run)
    steps = read_metrics(tmp_path / "run")
    assert [step["curriculum/stage"] for step in steps] == [1, 2]
    assert all({"accuracy/train/comparison", "accuracy/train/text"} <= step.keys() for step in steps)
