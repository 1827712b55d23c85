"""Settings as Python arguments: nested mappings and dotted names become overrides for `load_config`.

Checks that recipes have too are not repeated here: the settings are loaded by the same code.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from typing_extensions import TypedDict

from fovea.config.describe import listed, settings
from fovea.run.fingerprint import GivenCode
from fovea.wiring.given import ARGUMENTS, Frames
from fovea_gym.environments.access import GradedEnvironment
from fovea_gym.environments.base import Split
from fovea_gym.environments.custom.loading import check_named, checked_environment, checked_reward, load_reward, name_of
from fovea_gym.errors import ConfigError
from fovea_gym.rows.rows import InMemory, given_rows
from fovea_gym.settings.base import Tree, check_depth, nested
from fovea_gym.tools.base import Tool
from fovea_gym.tools.loading import load_tools

RewardArgument: TypeAlias = str | Callable[..., object] | Sequence[str | Callable[..., object]] | None
"""A function of task, text and images (docs/own.md) or with TRL's signature, `path/to/file.py:function`, or a list."""
ToolsArgument: TypeAlias = Sequence[str | Callable[..., object] | Tool]
"""Functions, tools, or names as in `environment.tools` (docs/agents.md)."""


def given_code(environment: object, reward: RewardArgument, tools: ToolsArgument = ()) -> GivenCode:
    """The arguments that are Python objects; ConfigError for an unsupported type."""
    if isinstance(environment, type):
        raise ConfigError(
            f"environment={environment.__name__} is a class; give an instance, {environment.__name__}(...)"
        )
    _check_environment(environment)
    rewards = _listed(reward)
    for each in rewards:
        _check_reward(each)
    if isinstance(tools, str) or not isinstance(tools, Sequence):
        raise ConfigError(f"tools={_shown(tools)} is of type {type(tools).__name__}; give a list, such as tools=[zoom]")
    given = [each for each in tools if not isinstance(each, str)]
    load_tools([name_of(each) for each in given], allow_python=False, given=given)
    is_setting = environment is None or isinstance(environment, str | Mapping)
    is_named = all(isinstance(each, str) for each in rewards)
    return GivenCode(
        environment=None if is_setting else environment,
        rewards=() if is_named else [load_reward(each) if isinstance(each, str) else each for each in rewards],
        tools=() if all(isinstance(each, str) for each in tools) else tuple(tools),
    )


def _shown(given: object) -> str:
    """The beginning of an argument, on one line."""
    return " ".join(f"{given!r:.60}".split())


def _listed(reward: RewardArgument) -> Sequence[str | Callable[..., object]]:
    if reward is None:
        return []
    return [reward] if isinstance(reward, str) or not isinstance(reward, Sequence) else reward


def _check_environment(environment: object) -> None:
    """ConfigError for an object that lacks the methods of an environment, or a name without a file."""
    if isinstance(environment, str) and ".py" in environment:
        check_named(environment, "environment")
    if isinstance(environment, int | float | list | tuple | set):
        raise ConfigError(
            f"environment={_shown(environment)} is of type {type(environment).__name__}; give a name such as 'shapes' "
            "(docs/environments.md), path/to/file.py:Class, the section environment={...}, or your own object "
            "(docs/own.md)"
        )
    of_fovea = environment is None or isinstance(environment, str | Mapping) or hasattr(environment, "graders")
    if not of_fovea and not isinstance(environment, GradedEnvironment):
        checked_environment(environment, type(environment).__name__, "environment")


def _check_reward(reward: object) -> None:
    """ConfigError for an object that cannot be called as a reward, or a name without a file."""
    if isinstance(reward, str):
        check_named(reward, "reward")
        return
    if isinstance(reward, type) or not callable(reward):
        kind = f"the class {reward.__name__}" if isinstance(reward, type) else f"of type {type(reward).__name__}"
        fix = f"give an instance, {reward.__name__}(...), or a function" if isinstance(reward, type) else "give one"
        raise ConfigError(
            f"reward={_shown(reward)} is {kind}, not a function; {fix} of the task, the text and the images, which "
            "returns a number or named parts"
        )
    checked_reward(reward, name_of(reward))


def code_settings(environment: object, reward: RewardArgument, tools: ToolsArgument = ()) -> dict[str, object]:
    """The settings that describe these arguments; an argument that is None has none."""
    given = given_code(environment, reward, tools)
    if given.environment is not None:
        environment = {"name": "own", "file": name_of(given.environment)}
    names = [each if isinstance(each, str) else name_of(each) for each in _listed(reward)]
    described = names if isinstance(reward, list | tuple) else next(iter(names), None)
    tool_names = [each if isinstance(each, str) else name_of(each) for each in tools]
    named = {"environment": environment, "reward": described, "environment.tools": tool_names or None}
    return {key: value for key, value in named.items() if value is not None}


def model_settings(model: str | os.PathLike[str] | Mapping[str, object] | None) -> dict[str, object]:
    """The settings for a model, which is given as a path, a Hub id or the section `model`."""
    if model is None:
        return {}
    if not isinstance(model, str | os.PathLike | Mapping):
        raise ConfigError(
            f"model is an object of type {type(model).__name__}, but a run loads its model itself; give a path or Hub "
            "id (save a model in memory first: save_pretrained(folder), and that of its processor), or settings"
        )
    return {"model": dict(model)} if isinstance(model, Mapping) else {"model": {"path": os.fspath(model), "tiny": None}}


FileName: TypeAlias = str | os.PathLike[str]
RowsArgument: TypeAlias = FileName | Sequence[FileName] | InMemory | None
"""Rows in memory, the name of a file or data set, or a list of names, as in `environment.train_files`."""

TEST_SHARE = 0.1
"""Share of the rows that is held out as test rows if none are given."""
ASKED: Mapping[str, object] = {"environment.test_files": [], "environment.test_share": 0.0}
"""Settings that make room for test rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsArguments:
    """The rows of each split, if given."""

    rows: RowsArgument = None
    test_rows: RowsArgument = None
    dev_rows: RowsArgument = None

    @property
    def frames(self) -> Frames:
        """The tables in memory, by split."""
        return {split: rows for split, rows in self._given.items() if not _file_names(rows)}

    @property
    def _given(self) -> dict[Split, Any]:
        given: dict[Split, RowsArgument] = {"train": self.rows, "dev": self.dev_rows, "test": self.test_rows}
        return {split: rows for split, rows in given.items() if rows is not None}

    def check(self) -> None:
        """DataError for an argument that is not a table, has no rows or has two columns with the same name."""
        for split, rows in self.frames.items():
            given_rows(rows, ARGUMENTS[split])

    def settings(self, *others: Mapping[str, object]) -> dict[str, object]:
        """Settings that make room for the given rows in all splits; `others` are the user's settings."""
        if self.rows is None:
            if self._given:
                raise ConfigError("test_rows and dev_rows are given, but no rows to train on; give rows as well")
            return {}
        made: dict[str, object] = {"environment.train_files": []}
        if self.test_rows is not None:
            made |= ASKED
        elif not is_set("environment.test_files", *others):
            made["environment.test_files"] = None
            if not is_set("environment.test_share", *others):
                made["environment.test_share"] = TEST_SHARE
        if not is_set("environment.dev_files", *others):
            made["environment.dev_files"] = None
        named = {f"environment.{split}_files": _file_names(rows) for split, rows in self._given.items()}
        return made | {key: names for key, names in named.items() if names}


def _file_names(rows: Any) -> list[str]:
    """The file names, if rows are given as the name of a file or a list of names; otherwise an empty list."""
    names = rows if isinstance(rows, list | tuple) else [rows]
    return [os.fspath(name) for name in names] if all(isinstance(name, str | os.PathLike) for name in names) else []


SectionSettings: TypeAlias = Mapping[str, object] | bool | None
"""The settings of a section; True for its defaults; None or False to leave out an optional section."""
Path: TypeAlias = tuple[str, ...]


class Settings(TypedDict, total=False):
    """The settings of a recipe (`fovea config` explains them), except those with a separate parameter."""

    seed: int
    run_dir: str | os.PathLike[str]
    max_steps: int
    max_epochs: int | None
    max_hours: float | None
    max_restarts: int
    resume: str | os.PathLike[str]
    resume_changed: str
    threads: int | None
    profile: bool
    reward_weights: Sequence[float] | None
    reward_timeout_seconds: float
    reward_on_failure: str
    reward_calls_at_once: int
    reward_in: str
    judge: SectionSettings
    reward_model: SectionSettings
    model_reward: SectionSettings
    second_opinion: str
    curriculum: SectionSettings
    data: SectionSettings
    warmup: SectionSettings
    rollout: SectionSettings
    algorithm: str | SectionSettings
    train: SectionSettings
    evaluate: SectionSettings
    parity: SectionSettings
    cluster: SectionSettings
    checkpoint: SectionSettings
    log: SectionSettings
    plan: SectionSettings


def overrides_of(*given: Mapping[str, object]) -> list[Tree]:
    """One override for each setting, with dotted or nested names; ConfigError for a setting that is given twice."""
    found: dict[Path, object] = {}
    for mapping in given:
        if not isinstance(mapping, Mapping):
            raise ConfigError(
                f"settings={_shown(mapping)} is of type {type(mapping).__name__}; give a mapping of names to values, "
                "such as settings={'seed': 1, 'rollout.top_p': 0.9}"
            )
        for key, value in mapping.items():
            if not isinstance(key, str):
                raise ConfigError(
                    f"settings: {key!r:.60} is not the name of a setting; write names as text, such as 'seed'"
                )
            check_depth(value, f"settings: {key}")
            for path, leaf in _leaves(tuple(key.split(".")), value):
                if path in found:
                    raise ConfigError(f"arguments: {'.'.join(path)} is given twice; give it once")
                found[path] = leaf
    return [nested(path, leaf) for path, leaf in found.items()]


def is_set(key: str, *given: Mapping[str, object]) -> bool:
    """True if the mappings set a dotted key, or something below it."""
    path = tuple(key.split("."))
    return any(next(_leaves((), tree))[0][: len(path)] == path for tree in overrides_of(*given))


def _leaves(path: Path, value: object, *, is_entry: bool = False) -> Iterator[tuple[Path, object]]:
    """The values in nested mappings, each with its path; an empty mapping is a value.

    The names in a section may be dotted. If a mapping is itself a setting, the user chooses the names of its entries.
    """
    if isinstance(value, Mapping) and value:
        _, own_key = listed(".".join(map(str, path)))
        is_entry = is_entry or any(each.key == own_key and each.type.startswith("mapping") for each in settings())
        for key, inner in value.items():
            names = key.split(".") if isinstance(key, str) and not is_entry else (key,)
            yield from _leaves((*path, *names), inner, is_entry=is_entry)
    else:
        yield path, _as_in_yaml(value)


def _as_in_yaml(value: Any) -> object:
    """Convert a value to what YAML would give: sequences to lists, paths to text, NumPy numbers to Python's."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {key: _as_in_yaml(inner) for key, inner in value.items()}
    return [_as_in_yaml(inner) for inner in value] if isinstance(value, list | tuple) else value
