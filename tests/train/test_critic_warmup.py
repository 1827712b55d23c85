"""A run of PPO that is stopped while its critic warms up, and goes on."""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path

import pytest

from fovea.config.run import Config
from fovea.loop import train
from fovea.wiring.run import build
from tests.runs import untimed
from tests.saved import saved_bytes

STOPPED, WARM_UP, STEPS = 1, 2, 4
TINY = {"hidden_size": 32, "num_layers": 1, "head_dim": 16, "vocabulary_size": 300}
REWARD = "def score(task, text, images):\n    return len(text) / 8\n"
"""One that an untrained model gets, some of it."""


def run(folder: Path, trunk: str, resume: str = "never") -> None:
    """A checkpoint after every step; the rate rises over all of them."""
    reward = folder.parent / "reward.py"
    reward.write_text(REWARD)
    critic = {"trunk": trunk, "warmup_steps": WARM_UP, "learning_rate": 1e-2}
    settings = {
        "run_dir": str(folder),
        "resume": resume,
        "max_steps": STEPS,
        "reward": f"{reward}:score",
        "model": {"tiny": TINY, "device": "cpu"},
        "environment": {"name": "shapes", "train_size": 16, "dev_size": 2, "test_size": 2},
        "rollout": {"prompts_per_step": 2, "samples_per_prompt": 2, "max_new_tokens": 4},
        "algorithm": {"name": "ppo", "ppo_epochs": 2, "advantage": {"critic": critic}},
        "train": {"learning_rate": 1e-2},
        "evaluate": {"image_controls": False, "shared_images": "ignore"},
        "parity": {"prompts": 0},
        "checkpoint": {"every_steps": 1, "keep": STEPS + 1},
        "log": {"tensorboard": False, "progress": False},
    }
    train(build(Config.model_validate(settings)))


def saved(folder: Path, step: int, name: str) -> bytes:
    return b"".join(saved_bytes(folder / "checkpoints" / f"step-{step}" / name).values())


@pytest.mark.parametrize("trunk", ["shared", "separate"])
def test_a_run_stopped_in_the_critics_warm_up_equals_one_never_stopped(trunk: str, tmp_path: Path) -> None:
    """Weights byte for byte, and the policy waits for as long."""
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    run(whole, trunk)
    shutil.copytree(whole, stopped)
    for step in range(STOPPED + 1, STEPS + 1):
        shutil.rmtree(stopped / "checkpoints" / f"step-{step}")
    run(stopped, trunk, resume="auto")
    for step in range(STEPS + 1):
        for name in ("trainable", "value"):
            assert saved(stopped, step, name) == saved(whole, step, name), f"{name} of step {step}"
    assert untimed(stopped) == untimed(whole)
    policies = [saved(stopped, step, "trainable") for step in range(STEPS + 1)]
    assert [a == b for a, b in pairwise(policies)] == [True] * WARM_UP + [False] * (STEPS - WARM_UP)
    assert len({saved(stopped, step, "value") for step in range(STEPS + 1)}) == STEPS + 1
