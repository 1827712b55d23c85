"""Make environments without a run, by the names and settings that recipes use."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from functools import reduce
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from fovea_gym.environments.access import Access
from fovea_gym.environments.base import Environment, defines
from fovea_gym.environments.custom.environment import UserEnvironment, UserSessions, user_graders
from fovea_gym.environments.custom.loading import checked_environment
from fovea_gym.environments.stages import stages_of
from fovea_gym.errors import ConfigError, first_line
from fovea_gym.graders.grading import CallThreads
from fovea_gym.rows.images import Size
from fovea_gym.rows.opening import default_opener
from fovea_gym.settings.base import NAME, Tree, file_meant, names_of, nested, over, variant_of
from fovea_gym.settings.environments import EnvironmentConfig
from fovea_gym.settings.splits import EnvironmentSettings
from fovea_gym.types import ImageRef


class _StoredPictures:
    """Picture sizes (`grounding.coordinates`) without a model: the sizes stored in the files."""

    def stored(self, ref: ImageRef) -> Size:
        return default_opener()(ref).size

    def seen(self, ref: ImageRef) -> Size:
        raise ConfigError(
            f"{ref.where}: coordinates=pixels and the default depend on a model, and no model is loaded here; set "
            "coordinates=thousandths, or original"
        )

    frame = seen


def make(name: str, *, seed: int = 0, access: Access | None = None, **settings: Any) -> Environment:
    """Make an environment: `make("geo3k", train_files=["geo3k.parquet"], test_share=0.1)`.

    The settings are listed in docs/environments.md; leave out their prefix `environment.`. `seed` is the seed of
    environments that generate their rows. `path/to/file.py:Class` names your own class. ConfigError for an unknown name
    or setting.
    """
    chosen = FieldInfo.from_annotation(EnvironmentConfig)  # type: ignore[arg-type]
    section = variant_of(chosen, name)
    if section is None and ".py:" in name:
        return make("own", seed=seed, access=access, file=name, **settings)
    if section is None:
        names = names_of(chosen)
        meant = file_meant(name) or next(iter(difflib.get_close_matches(name, names, n=1)), None)
        fix = f"did you mean {meant}?" if meant else f"choose one of {', '.join(names)}"
        raise ConfigError(f"there is no environment {name}; {fix}")
    try:
        made = section.model_validate({NAME: name, **settings}, strict=True)
    except ValidationError as error:
        raise ConfigError(f"{name}: {first_line(error).partition(': ')[2]}") from error
    assert isinstance(made, EnvironmentSettings), name
    given = made.made(access or Access(pictures=_StoredPictures()), seed)
    return given if isinstance(given, Environment) else _graded(checked_environment(given, name), name)


def _graded(user: Any, name: str) -> Environment:
    """Wrap a user's object as an environment with its graders."""
    made = UserSessions(user, name, CallThreads(name)) if defines(user, "open") else UserEnvironment(user, name)
    made.graders = tuple(getattr(user, "graders", ())) or user_graders(user, stages_of(user), f"{name}.score")
    return made


def settings_of(words: Sequence[str]) -> Tree:
    """Parse settings from `key=value` arguments with YAML values, such as `side=5` and `session.retries=1`."""
    import yaml

    trees: list[Tree] = []
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not all(part.isidentifier() for part in key.split(".")):
            raise ConfigError(f"{word:.60} is not a setting; write it as key=value, such as train_size=100")
        try:
            trees.append(nested(key.split("."), yaml.safe_load(value)))
        except yaml.YAMLError as error:
            raise ConfigError(f"{key}: {value[:60]} is not valid YAML; put it in quotes") from error
    return reduce(over, trees, {})
