"""Settings that come with a folder: they say which rows and which model, and never which code runs on this machine.

A run folder or an export may be a stranger's. Its settings are believed for what they describe; what they would run,
send or open is refused, unless the user names it on the command line or trusts the folder for this one command.
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
    """ConfigError where a folder's `file` chooses a part of another package that the user does not name too.

    To be called before `file` is loaded, which imports the package, also where an override chooses another part.
    """
    if trust:
        return
    named = {part for each in overrides for part in package_parts(read_override(each)[1])}
    for key, name in sorted(package_parts(read_recipe(file)) - named):
        raise ConfigError(
            f"{file} runs the code of another package by {key}={name}, and what a folder says runs no code here; add "
            f"trust=True, if the folder is your own, or set {key}={name} yourself"
        )


def check_trust(
    config: Config, file: Path, overrides: Sequence[Override], *, trust: bool, trains: bool = False
) -> None:
    """ConfigError where `config`, read from a folder's `file`, would use a power that the user did not name.

    These are to run code, to send rows or a key to a judge, and to reach private addresses; with `trains` those of
    engine and backend, too. `overrides` are the user's own settings: what they set is the user's, whatever the file
    says. Parts of other packages are for `check_packages` to refuse, before they are imported.
    """
    if trust:
        return
    for key, refused, instead in (*_powers(config), *(_training_powers(config) if trains else ())):
        if key not in keys_of(overrides):
            raise ConfigError(
                f"{file} {refused}, and what a folder says runs no code, sends no row or key to a judge and opens no "
                f"private network here; add trust=True, if the folder is your own, or set {instead}"
            )


def wants_trust(config: Config) -> bool:
    """True if a run of these settings is evaluated only by `--trust`: for what they name, or Megatron's pickle."""
    of_packages = package_parts(config.model_dump())
    return bool(of_packages) or isinstance(config.train.backend, MegatronBackend) or any(True for _ in _powers(config))


def _powers(config: Config) -> Iterator[tuple[str, str, str]]:
    """The settings with such a power: the key that names it, what it does, and what to set instead."""
    for key, rewards in config.rewards.items():
        for reward in rewards:
            if reward.startswith(FROM_PYTHON):
                continue  # no code is named; whoever loads it says that it must be given again
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
    """The settings with such a power only in training, as `_powers` gives them."""
    for key, does, fix in config.rollout.engine.powers():
        yield f"rollout.engine.{key}", does, fix
    if isinstance(config.train.backend, MegatronBackend):
        yield "train.backend.name", "reads a pickle, which can run code (train.backend=megatron)", "train.backend=torch"
