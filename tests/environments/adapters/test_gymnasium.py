"""An environment of gymnasium in the settings of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from fovea.config.loading import load_config
from fovea.wiring.environment import make_environment
from fovea_gym.adapters.gymnasium import Gymnasium
from fovea_gym.environments.sessions import LimitedSessions
from fovea_gym.errors import ConfigError
from fovea_gym.graders.base import NoScoreError
from fovea_gym.types import Turn
from fovea_gym.utils.event_loop import wait_for

GAMES = Path(__file__).parents[3] / "gym/gym_tests/adapters/gym_game.py"


def test_settings_make_the_environment_and_a_warm_up_is_refused() -> None:
    overrides = [f"environment.id={GAMES}:Walk", "environment.name=gymnasium", "model.path=tiny", "run_dir=runs/x"]
    made = make_environment(load_config([], overrides))
    assert isinstance(made.environment, LimitedSessions)
    assert isinstance(made.environment.inside, Gymnasium)
    with pytest.raises(NoScoreError, match="scores an episode while it is played"):
        wait_for(made.grading.graders[-1].score(made.environment.tasks("train")[0], [Turn(messages=(), text="1")]))
    with pytest.raises(ConfigError, match=r"^warmup\b.*\benvironment\.name=gymnasium\b"):
        make_environment(load_config([], [*overrides, "warmup.max_steps=3"]))
