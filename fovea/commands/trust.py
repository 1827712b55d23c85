"""Settings that come with a folder: they choose rows and model, but never the code that runs on this machine.

A run folder or an export may be a stranger's. Its settings may describe rows and model; but what would run code, send
data or open private networks is refused, unless the user sets it on the command line or trusts the folder for this one
command.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from fovea.config.backends import MegatronBackend
from fovea.config.loading import keys_of, package_parts
from fovea.config.recipes import Override, read_override, read_recipe
from fovea.config.run import Config
from fovea_gym.errors import ConfigError
from fovea_gym.settings.environments import OwnEnvironment
from fovea_gym.settings.rewards import FROM_PYTHON


def check_packages(file: Path, overrides: Sequence[Override], *, trust: bool) -> None:
    """ConfigError if a folder's `file` chooses a component of another package that the user does not choose too.

    Call it before `file` is loaded: loading imports the package, even if an override chooses another component.
    """
    if trust:
        return
    named = {part for each in overrides for part in package_parts(read_override(each)[1])}
    for key, name in sorted(package_parts(read_recipe(file)) - named):
        raise ConfigError(
            f"{file} runs the code of another package by {key}={name}, but settings in a folder may not run code; add "
            f"trust=True if the folder is your own, or set {key}={name} yourself"
        )


def check_trust(
    config: Config, file: Path, overrides: Sequence[Override], *, trust: bool, trains: bool = False
) -> None:
    """ConfigError if `config`, read from a folder's `file`, would use a power that the user did not set.

    Powers are to run code, to send rows or a key to a judge, and to reach private addresses; with `trains`, also those
    of engine and backend. A setting in `overrides` is the user's own, whatever the file says. `check_packages` refuses
    components of other packages, before they are imported.
    """
    if trust:
        return
    for key, refused, instead in (*_powers(config), *(_training_powers(config) if trains else ())):
        if key not in keys_of(overrides):
            raise ConfigError(
                f"{file} {refused}, but settings in a folder may not run code, send rows or a key to a judge, or open "
                f"private networks; add trust=True if the folder is your own, or set {instead}"
            )


def wants_trust(config: Config) -> bool:
    """True if evaluating a run with these settings needs `--trust`, for code that they name or Megatron's pickle."""
    of_packages = package_parts(config.model_dump())
    return bool(of_packages) or isinstance(config.train.backend, MegatronBackend) or any(True for _ in _powers(config))


def _powers(config: Config) -> Iterator[tuple[str, str, str]]:
    """The settings with such a power: key, effect, and what to set instead."""
    for key, rewards in config.rewards.items():
        for reward in rewards:
            if reward.startswith(FROM_PYTHON):
                continue  # no file is named; loading it raises an error that asks for the function again
            yield key, f"runs the code of {key}={reward}", f"{key}=null, or {key}=FILE.py:FUNCTION of yours"
    for key, environment in config.environments.items():
        if isinstance(environment, OwnEnvironment):
            yield f"{key}.file", f"runs the code of {key}={environment.file}", f"{key}=FILE.py:CLASS of yours"
    for tool in config.environment.tools:
        if (":" in tool or tool == "python") and not tool.startswith(FROM_PYTHON):
            yield "environment.tools", f"runs the code of environment.tools={tool}", "environment.tools=[]"
    if (judge := config.judge) is not None:
        sent = "rows" if judge.api_key_env is None else f"the key in {judge.api_key_env}"
        yield "judge.url", f"sends {sent} to judge.url={judge.url}", "judge.url=URL"
    private = "data.allow_private_addresses"
    if config.data.allow_private_addresses:
        yield private, f"lets rows reach this machine and private networks by {private}=true", f"{private}=false"


def _training_powers(config: Config) -> Iterator[tuple[str, str, str]]:
    """The settings that have such a power only in training, in the form of `_powers`."""
    for key, does, fix in config.rollout.engine.powers():
        yield f"rollout.engine.{key}", does, fix
    if isinstance(config.train.backend, MegatronBackend):
        yield "train.backend.name", "reads a pickle, which can run code (train.backend=megatron)", "train.backend=torch"
