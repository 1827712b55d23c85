"""Environments by the name and the settings that recipes write, without a run."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import reduce
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from fovea_gym.environments.base import Environment, MakesEnvironment
from fovea_gym.errors import ConfigError, first_line
from fovea_gym.rows.images import Size
from fovea_gym.rows.opening import default_opener
from fovea_gym.settings.base import NAME, Tree, names_of, nested, over, variant_of
from fovea_gym.settings.environments import EnvironmentConfig
from fovea_gym.settings.splits import DrawnRows, EnvironmentSettings, SplitFiles
from fovea_gym.types import ImageRef

if TYPE_CHECKING:  # readers of files, which environments that draw their rows start without
    from fovea_gym.rows.rows import RowAccess

_ENVIRONMENTS = {
    "shapes": "environments.shapes.environment:Shapes",
    "shapes_zoom": "environments.shapes.environment:ShapesZoom",
    "shapes_small": "environments.shapes.small:SmallShapes",
    "grounding_shapes": "environments.grounding.shapes:GroundingShapes",
    "frozen_lake": "examples.games.environment:BoardGame",
    "sokoban": "examples.games.environment:BoardGame",
    "pages": "examples.pages.environment:Pages",
    "geo3k": "environments.geo3k:Geo3k",
    "vqa": "environments.vqa:Vqa",
    "rows": "environments.dataset_tasks:OwnRows",
    "caption": "environments.caption:Caption",
    "geospot": "environments.geospot.environment:GeoSpot",
    "grounding": "environments.grounding.environment:Grounding",
    "nemo_gym": "adapters.nemo_gym:NemoGym",
    "gymnasium": "adapters.gymnasium:Gymnasium",
    "openenv": "adapters.openenv:OpenEnv",
}
"""The class of each environment, which is imported when it is made."""


class _StoredPictures:
    """Pictures (`grounding.coordinates`) without a model: their sizes are those of the files."""

    def stored(self, ref: ImageRef) -> Size:
        return default_opener()(ref).size

    def seen(self, ref: ImageRef) -> Size:
        raise ConfigError(
            f"{ref.where}: coordinates=pixels and the default are those of a model, and there is none here; set "
            "coordinates=thousandths, or original"
        )

    frame = seen


def make(name: str, *, seed: int = 0, access: RowAccess | None = None, **settings: Any) -> Environment:
    """Make an environment: `make("geo3k", train_files=["geo3k.parquet"], test_share=0.1)`.

    The settings are those of docs/environments.md, without `environment.` before them; `seed` draws the rows of those
    that draw them. ConfigError for an unknown name or setting.
    """
    chosen = FieldInfo.from_annotation(EnvironmentConfig)  # type: ignore[arg-type]
    section = variant_of(chosen, name)
    if section is None:
        raise ConfigError(f"there is no environment {name}; choose one of {', '.join(names_of(chosen))}")
    try:
        made = section.model_validate({NAME: name, **settings}, strict=True)
    except ValidationError as error:
        raise ConfigError(f"{name}: {first_line(error).partition(': ')[2]}") from error
    assert isinstance(made, EnvironmentSettings), section
    return _made(made, seed, access)


def _made(settings: EnvironmentSettings, seed: int, access: RowAccess | None) -> Environment:
    if isinstance(settings, DrawnRows) and settings.name in _ENVIRONMENTS:
        drawn: Environment = _class_of(settings)(settings, seed)
        return drawn
    from fovea_gym.rows.rows import RowAccess

    access = access or RowAccess()
    if isinstance(settings, MakesEnvironment):
        environment: Any = settings.make_environment(access, seed)
        return environment
    if settings.name not in _ENVIRONMENTS:
        raise ConfigError(f"{settings.name} is made by a run of Fovea; name an environment with rows of its own")
    if settings.name == "grounding":
        made: Environment = _class_of(settings)(settings, access, _StoredPictures())
    elif isinstance(settings, SplitFiles):
        made = _class_of(settings)(settings, access)
    else:
        made = _class_of(settings)(settings)
    return made


def _class_of(settings: EnvironmentSettings) -> Any:
    module, _, name = _ENVIRONMENTS[settings.name].partition(":")
    return getattr(importlib.import_module(f"fovea_gym.{module}"), name)


def settings_of(words: list[str]) -> Mapping[str, Any]:
    """Settings from words `key=value`, whose values are YAML, such as `side=5` and `session.retries=1`."""
    import yaml

    trees: list[Tree] = []
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not all(part.isidentifier() for part in key.split(".")):
            raise ConfigError(f"{word:.60} is no setting; write it as key=value, such as train_size=100")
        try:
            trees.append(nested(key.split("."), yaml.safe_load(value)))
        except yaml.YAMLError as error:
            raise ConfigError(f"{key}: {value[:60]} is not valid YAML; put it in quotes") from error
    return reduce(over, trees, {})
