"""Arguments that are objects of the user's code, as what the settings say of them and as what a run is given."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from fovea.environments.custom.loading import RewardFunction, checked_reward, name_of
from fovea.errors import ConfigError
from fovea.run.inputs import GivenCode

RewardArgument: TypeAlias = str | RewardFunction | None
"""A function of the task, the completion's text and the task's images (docs/own.md), or `path/to/file.py:function`."""


def given_code(environment: object, reward: RewardArgument) -> GivenCode:
    """Those of the arguments that are objects; ConfigError for what is none of the things that they may be."""
    if isinstance(environment, type):
        raise ConfigError(
            f"environment={environment.__name__} is a class; give an object of it, {environment.__name__}(...)"
        )
    if isinstance(reward, list | tuple):
        raise ConfigError(_several_rewards(reward))
    if reward is not None and not isinstance(reward, str) and not callable(reward):
        raise ConfigError(
            f"reward={reward!r:.60} is of type {type(reward).__name__}, no function; give one of the task, the text "
            "and the images, which returns a number or named parts"
        )
    if reward is not None and not isinstance(reward, str):
        checked_reward(reward, name_of(reward))
    is_setting = environment is None or isinstance(environment, str | Mapping)
    return GivenCode(
        environment=None if is_setting else environment, reward=None if isinstance(reward, str) else reward
    )


def _several_rewards(rewards: Sequence[object]) -> str:
    names = [str(getattr(each, "__name__", f"reward_{place}")) for place, each in enumerate(rewards)]
    parts = ", ".join(f'"{name}": {name}(task, text, images)' for name in names)
    return (
        f"reward is a list of {len(rewards)}, and a run has one, whose parts are added and logged by name; give "
        f"reward=lambda task, text, images: {{{parts}}}, with a weight before each call"
    )


def code_settings(environment: object, reward: RewardArgument) -> dict[str, object]:
    """The settings that describe these arguments; none for those that are None."""
    given = given_code(environment, reward)
    if given.environment is not None:
        environment = {"name": "own", "file": name_of(given.environment)}
    if given.reward is not None:
        reward = name_of(given.reward)
    named = {"environment": environment, "reward": reward}
    return {key: value for key, value in named.items() if value is not None}


def model_settings(model: str | os.PathLike[str] | Mapping[str, object] | None) -> dict[str, object]:
    """The settings of a model that is given as its path or hub id, or as the section `model`."""
    if model is None:
        return {}
    if not isinstance(model, str | os.PathLike | Mapping):
        raise ConfigError(
            f"model is an object of type {type(model).__name__}, and a run loads its model itself; give a path or hub "
            "id (save a model in memory first: save_pretrained(folder), and that of its processor), or settings"
        )
    return {"model": dict(model)} if isinstance(model, Mapping) else {"model": {"path": os.fspath(model), "tiny": None}}
