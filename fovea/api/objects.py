"""Arguments that are objects of the user's code, as what the settings say of them and as what a run is given."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from fovea.build.environment import GradedEnvironment
from fovea.environments.custom.loading import check_named, checked_environment, checked_reward, load_reward, name_of
from fovea.errors import ConfigError
from fovea.run.inputs import GivenCode

RewardArgument: TypeAlias = str | Callable[..., object] | Sequence[str | Callable[..., object]] | None
"""A function of the task, the completion's text and the task's images (docs/own.md) or of TRL's signature, `path/to/
file.py:function`, or a list of these."""


def given_code(environment: object, reward: RewardArgument) -> GivenCode:
    """Arguments given as Python objects; ConfigError for an unsupported type."""
    if isinstance(environment, type):
        raise ConfigError(
            f"environment={environment.__name__} is a class; give an object of it, {environment.__name__}(...)"
        )
    _check_environment(environment)
    rewards = _listed(reward)
    for each in rewards:
        _check_reward(each)
    is_setting = environment is None or isinstance(environment, str | Mapping)
    is_named = all(isinstance(each, str) for each in rewards)
    return GivenCode(
        environment=None if is_setting else environment,
        rewards=() if is_named else [load_reward(each) if isinstance(each, str) else each for each in rewards],
    )


def _listed(reward: RewardArgument) -> Sequence[str | Callable[..., object]]:
    if reward is None:
        return []
    return [reward] if isinstance(reward, str) or not isinstance(reward, Sequence) else reward


def _check_environment(environment: object) -> None:
    """ConfigError for an object that lacks the methods of an environment, and for a name without a file."""
    if isinstance(environment, str) and ".py" in environment:
        check_named(environment, "environment")
    if isinstance(environment, int | float | list | tuple | set):
        raise ConfigError(
            f"environment={environment!r:.60} is of type {type(environment).__name__}; give a name such as 'shapes' "
            "(docs/environments.md), path/to/file.py:Class, the section environment={...}, or an object of yours "
            "(docs/own.md)"
        )
    of_fovea = environment is None or isinstance(environment, str | Mapping) or hasattr(environment, "graders")
    if not of_fovea and not isinstance(environment, GradedEnvironment):
        checked_environment(environment, type(environment).__name__)


def _check_reward(reward: object) -> None:
    """ConfigError for an object that cannot be called as a reward, and for a name without a file."""
    if isinstance(reward, str):
        check_named(reward, "reward")
        return
    if isinstance(reward, type) or not callable(reward):
        kind = f"the class {reward.__name__}" if isinstance(reward, type) else f"of type {type(reward).__name__}"
        fix = f"give an object of it, {reward.__name__}(...), or a function" if isinstance(reward, type) else "give one"
        raise ConfigError(
            f"reward={reward!r:.60} is {kind}, no function; {fix} of the task, the text and the images, which returns "
            "a number or named parts"
        )
    checked_reward(reward, name_of(reward))


def code_settings(environment: object, reward: RewardArgument) -> dict[str, object]:
    """The settings that describe these arguments; none for those that are None."""
    given = given_code(environment, reward)
    if given.environment is not None:
        environment = {"name": "own", "file": name_of(given.environment)}
    names = [each if isinstance(each, str) else name_of(each) for each in _listed(reward)]
    described = names if isinstance(reward, list | tuple) else next(iter(names), None)
    named = {"environment": environment, "reward": described}
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
