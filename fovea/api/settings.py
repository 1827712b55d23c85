"""Settings as Python arguments: nested mappings and dotted names become the overrides that `load_config` takes.

Nothing is checked here that a recipe's checks would find: the same tree of settings is made, by the same code.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from typing_extensions import TypedDict

from fovea.config.base import Tree, check_depth
from fovea.config.listing import listed, settings
from fovea.errors import ConfigError

SectionSettings: TypeAlias = Mapping[str, object] | bool | None
"""The settings of a section, True for its defaults, None or False for the absence of one that may be absent."""
Path: TypeAlias = tuple[str, ...]


class Settings(TypedDict, total=False):
    """The settings of a recipe, as `fovea config` explains them, but for those with a parameter of their own."""

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
    reward_limit: float
    reward_calls_at_once: int
    reward_in: str
    model_reward: SectionSettings
    second_opinion: SectionSettings
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
    """One override for each setting in the mappings; ConfigError for a setting that comes twice.

    The keys of a mapping may be dotted names, as on the command line; the mappings below them are sections.
    """
    found: dict[Path, object] = {}
    for mapping in given:
        if not isinstance(mapping, Mapping):
            raise ConfigError(
                f"settings={mapping!r:.60} is of type {type(mapping).__name__}; give a mapping of names to values, "
                "such as settings={'seed': 1, 'rollout.top_p': 0.9}"
            )
        for key, value in mapping.items():
            if not isinstance(key, str):
                raise ConfigError(
                    f"settings: {key!r:.60} is no name of a setting; write names as texts, such as 'seed'"
                )
            check_depth(value, f"settings: {key}")
            for path, leaf in _leaves(tuple(key.split(".")), value):
                if path in found:
                    raise ConfigError(f"arguments: {'.'.join(path)} is given twice; give it once")
                found[path] = leaf
    return [_tree(path, leaf) for path, leaf in found.items()]


def is_set(key: str, *given: Mapping[str, object]) -> bool:
    """Whether the mappings set a dotted key, or something below it."""
    path = tuple(key.split("."))
    return any(next(iter(_paths(tree)))[: len(path)] == path for tree in overrides_of(*given))


def _paths(tree: Tree) -> Iterator[Path]:
    return (path for path, _ in _leaves((), tree))


def _leaves(path: Path, value: object, *, is_entry: bool = False) -> Iterator[tuple[Path, object]]:
    """The values of nested mappings, and the way to each; an empty mapping is a value.

    The names of a section may be dotted. The entries of a mapping that is itself a setting have names of the user's.
    """
    if isinstance(value, Mapping) and value:
        is_entry = is_entry or _is_mapping(path)
        for key, inner in value.items():
            names = key.split(".") if isinstance(key, str) and not is_entry else (key,)
            yield from _leaves((*path, *names), inner, is_entry=is_entry)
    else:
        yield path, _as_in_yaml(value)


def _is_mapping(path: Path) -> bool:
    _, key = listed(".".join(map(str, path)))
    return any(setting.key == key and setting.type.startswith("mapping") for setting in settings())


def _as_in_yaml(value: Any) -> object:
    """A value as YAML would give it: sequences as lists, paths as texts, NumPy's numbers as Python's."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {key: _as_in_yaml(inner) for key, inner in value.items()}
    return [_as_in_yaml(inner) for inner in value] if isinstance(value, list | tuple) else value


def _tree(path: Path, leaf: object) -> Tree:
    tree: Any = leaf
    for key in reversed(path):
        tree = {key: tree}
    whole: Tree = tree
    return whole
