"""Environments by the name and the settings that recipes write, without a run."""

from __future__ import annotations

from collections.abc import Sequence
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
from fovea_gym.types import ImageRef

if TYPE_CHECKING:  # readers of files, which environments that draw their rows start without
    from fovea_gym.rows.rows import RowAccess


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
    environment: Environment = _made(made, seed, access)
    return environment


def _made(settings: Any, seed: int, access: RowAccess | None) -> Any:
    """The environment of these settings; its module, and readers of files, are imported now."""
    match settings.name:
        case "shapes":
            from fovea_gym.environments.shapes.environment import Shapes

            return Shapes(settings, seed)
        case "shapes_zoom":
            from fovea_gym.environments.shapes.environment import ShapesZoom

            return ShapesZoom(settings, seed)
        case "shapes_small":
            from fovea_gym.environments.shapes.small import SmallShapes

            return SmallShapes(settings, seed)
        case "grounding_shapes":
            from fovea_gym.environments.grounding.shapes import GroundingShapes

            return GroundingShapes(settings, seed)
        case "frozen_lake" | "sokoban":
            from fovea_gym.examples.games.environment import BoardGame

            return BoardGame(settings, seed)
        case "pages":
            from fovea_gym.examples.pages.environment import Pages

            return Pages(settings, seed)
        case "gymnasium":
            from fovea_gym.adapters.gymnasium import Gymnasium

            return Gymnasium(settings)
        case "openenv":
            from fovea_gym.adapters.openenv import OpenEnv

            return OpenEnv(settings)
    return _from_files(settings, seed, access)


def _from_files(settings: Any, seed: int, access: RowAccess | None) -> Any:
    from fovea_gym.environments.custom.environment import UserEnvironment
    from fovea_gym.environments.custom.loading import load_environment
    from fovea_gym.rows.rows import RowAccess

    access = access or RowAccess()
    match settings.name:
        case "geo3k":
            from fovea_gym.environments.geo3k import Geo3k

            return Geo3k(settings, access)
        case "vqa":
            from fovea_gym.environments.vqa import Vqa

            return Vqa(settings, access)
        case "rows":
            from fovea_gym.environments.dataset_tasks import OwnRows

            return OwnRows(settings, access)
        case "caption":
            from fovea_gym.environments.caption import Caption

            return Caption(settings, access)
        case "geospot":
            from fovea_gym.environments.geospot.environment import GeoSpot

            return GeoSpot(settings, access)
        case "grounding":
            from fovea_gym.environments.grounding.environment import Grounding

            return Grounding(settings, access, _StoredPictures())
        case "nemo_gym":
            from fovea_gym.adapters.nemo_gym import NemoGym

            return NemoGym(settings, access)
        case "own":
            return UserEnvironment(load_environment(settings), settings.file)
    if isinstance(settings, MakesEnvironment):
        made = settings.make_environment(access, seed)
        return made if hasattr(made, "graders") else UserEnvironment(made, settings.name)
    raise ConfigError(f"{settings.name} is made by a run of Fovea; make one of its parts by its name")


def settings_of(words: Sequence[str]) -> Tree:
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
