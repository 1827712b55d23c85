"""Views of the prompts of a step: with noise to sample on (`rollout.views`), masked for the loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from fovea.config.run import Config
from fovea.config.views import RolloutViews
from fovea.data.prompt_source import PromptedTask, PromptSource
from fovea.data.views import SeededView, View, mask_of, noise_of
from fovea.types import Group, Metrics, Prompt
from fovea_gym.environments.base import Environment
from fovea_gym.errors import ConfigError

NOISY, MASKED = 0, 1
"""Kinds of view, in the seed of a picture: seed of the run, step, group, kind, picture."""


def in_one_turn(config: Config, environment: Environment) -> Environment:
    """The environment; ConfigError for views in one of several turns, whose later pictures no view changes."""
    given = {"rollout.views": config.rollout.views, "algorithm.views": config.algorithm.views}
    several = environment.max_turns > 1 or environment.has_sessions
    for key in (key for key, views in given.items() if views is not None and several):
        raise ConfigError(
            f"{key} changes the pictures of prompts, but environment={config.environment.name} shows others in later "
            f"turns, also by its tools; set {key}=null"
        )
    return environment


def with_views(
    source: PromptSource, prompted: Sequence[PromptedTask], config: Config, *, step: int, num_before: int
) -> list[PromptedTask]:
    """The tasks of a step, counted from 0, with the views that the settings ask for; the same in every run."""
    noisy, masked = config.rollout.views, config.algorithm.views
    noise: View | None = None if noisy is None else noise_of(noisy, step + 1, config.max_steps)
    mask: View | None = None if masked is None else mask_of(masked)

    def work(index: int, item: PromptedTask, view: View, kind: int) -> Callable[[], Prompt]:
        seed = (config.seed, step, index, kind)
        return source.view(item, lambda number: SeededView(view=view, seed=(*seed, number)))

    numbered = list(enumerate(prompted, start=num_before))
    views = [(kind, view) for kind, view in ((NOISY, noise), (MASKED, mask)) if view is not None]
    made = source.at_once(
        {(index, kind): work(index, item, view, kind) for kind, view in views for index, item in numbered}
    )
    return [replace(item, noisy=made.get((index, NOISY)), masked=made.get((index, MASKED))) for index, item in numbered]


def view_metrics(groups: Sequence[Group], settings: RolloutViews, step: int, max_steps: int) -> Metrics:
    """The noise of a step, counted from 0, and the accuracy of completions drawn on it; empty without any."""
    episodes = [episode for group in groups for episode in group.episodes if episode.tokens[0].on_view]
    if not episodes:
        return {}
    return {
        "views/noise_step": float(noise_of(settings, step + 1, max_steps).step),
        "accuracy/noisy": float(np.mean([episode.score.accuracy for episode in episodes])),
    }
