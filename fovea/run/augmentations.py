"""Augmented prompts of a step: noisy images to sample from (`rollout.augmentation`), masked images for the loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from fovea.config.augmentations import NoisyPictures
from fovea.config.run import Config
from fovea.data.augmentations import Augmentation, SeededAugmentation, mask_of, noise_of
from fovea.data.prompt_source import PromptedTask, PromptSource
from fovea.types import Group, Metrics, Prompt
from fovea_gym.environments.base import Environment
from fovea_gym.errors import ConfigError

NOISY, MASKED = 0, 1
"""Kinds of augmentation, as part of an image's seed: (seed of the run, step, group, kind, image)."""


def in_one_turn(config: Config, environment: Environment) -> Environment:
    """Return the environment; ConfigError for augmentation in several turns, since it changes only prompt images."""
    given = {
        "rollout.augmentation": config.rollout.augmentation,
        "algorithm.augmentation": config.algorithm.augmentation,
    }
    several = environment.max_turns > 1 or environment.has_sessions
    for key in (key for key, augmentation in given.items() if augmentation is not None and several):
        raise ConfigError(
            f"{key} changes the images of the prompt only, but environment={config.environment.name} shows further "
            f"images in later turns, possibly by its tools; set {key}=null"
        )
    return environment


def with_augmentations(
    source: PromptSource, prompted: Sequence[PromptedTask], config: Config, *, step: int, num_before: int
) -> list[PromptedTask]:
    """The tasks of a step, counted from 0, with augmented prompts as set; the same in every run with this seed."""
    noisy, masked = config.rollout.augmentation, config.algorithm.augmentation
    noise: Augmentation | None = None if noisy is None else noise_of(noisy, step + 1, config.max_steps)
    mask: Augmentation | None = None if masked is None else mask_of(masked)

    def work(index: int, item: PromptedTask, change: Augmentation, kind: int) -> Callable[[], Prompt]:
        seed = (config.seed, step, index, kind)
        return source.augmented(item, lambda number: SeededAugmentation(change=change, seed=(*seed, number)))

    numbered = list(enumerate(prompted, start=num_before))
    augmentation = [(kind, change) for kind, change in ((NOISY, noise), (MASKED, mask)) if change is not None]
    made = source.at_once(
        {(index, kind): work(index, item, change, kind) for kind, change in augmentation for index, item in numbered}
    )
    return [replace(item, noisy=made.get((index, NOISY)), masked=made.get((index, MASKED))) for index, item in numbered]


def augmentation_metrics(groups: Sequence[Group], settings: NoisyPictures, step: int, max_steps: int) -> Metrics:
    """The noise level of a step, counted from 0, and the accuracy of noisy completions; empty if there are none."""
    episodes = [episode for group in groups for episode in group.episodes if episode.tokens[0].is_noisy]
    if not episodes:
        return {}
    return {
        "augmentation/noise_step": float(noise_of(settings, step + 1, max_steps).step),
        "accuracy/noisy": float(np.mean([episode.score.accuracy for episode in episodes])),
    }
