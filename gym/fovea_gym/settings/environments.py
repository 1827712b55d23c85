"""Settings of the environments; `environment.name` chooses one of these sections."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import ConfigDict, Field
from pydantic.fields import FieldInfo

from fovea_gym.errors import ConfigError
from fovea_gym.settings.base import (
    Fraction,
    HttpUrl,
    NonNegativeFloat,
    OpenUnion,
    PositiveFloat,
    RowCount,
    Section,
    Tree,
)
from fovea_gym.settings.grounding import GroundingEnvironment, GroundingShapesEnvironment
from fovea_gym.settings.splits import DrawnRows, EnvironmentSettings, FileEnvironment, SessionLimits, SplitFiles

if TYPE_CHECKING:  # reading settings does not import the environments
    from fovea_gym.environments.access import Access, Part
    from fovea_gym.environments.base import Environment

GeoPart: TypeAlias = Literal["country", "region", "city", "coordinates"]
GeoColumn: TypeAlias = Literal["country", "region", "city", "lat", "lon"]
GEO_WEIGHTS: dict[GeoPart, float] = {"country": 0.3, "region": 0.2, "city": 0.2, "coordinates": 0.3}
GEO_COLUMNS: dict[GeoColumn, str] = {"country": "country", "city": "city", "lat": "lat", "lon": "lon"}


class GeoSpotEnvironment(SplitFiles):
    """GeoSpot: country, region, city and coordinates of a picture, asked for in stages (see `curriculum`)."""

    name: Literal["geospot"] = "geospot"
    image_key: str | None = None
    """Column of the picture; default: image, or image_url if there is no column image."""
    columns: dict[GeoColumn, str] = Field(default=GEO_COLUMNS)
    """Columns of the country (a name or an ISO code), the region (a state or province; default: region, if there is
    such a column), the city (not asked for if the cell is empty), and lat and lon in degrees, south and west
    negative."""
    level_key: str | None = None
    """Column of the level of difficulty, a text; curriculum.level_weights samples rows by it."""
    prompt: str = (
        "Where was this picture taken? Answer with five lines: City: ..., Region: ... (state or province), "
        "Country: ..., Latitude: ... and Longitude: ... in decimal degrees."
    )
    """The question, which is the same for every picture."""
    system_prompt: str | None = None
    """System prompt."""
    weights: dict[GeoPart, NonNegativeFloat] = Field(default=GEO_WEIGHTS)
    """Weights of the parts of the reward; the weights of the parts that a stage asks for are scaled to sum to 1. The
    score for coordinates is exp(-distance / tolerance)."""
    tolerances_km: Annotated[tuple[PositiveFloat, ...], Field(min_length=5, max_length=5)] = (500, 200, 100, 50, 25)
    """Distance at which the score for coordinates falls to 1/e, for each of the five stages, in falling order."""

    @property
    def image_names(self) -> tuple[str, ...]:
        return ("image", "image_url") if self.image_key is None else (self.image_key,)

    @property
    def named_columns(self) -> list[tuple[str, str]]:
        named = [(key, getattr(self, key)) for key in ("image_key", "level_key")]
        named += [(f"columns.{key}", column) for key, column in self.columns.items()]
        return [(setting, column) for setting, column in named if column is not None]

    @property
    def names_images(self) -> bool:
        return self.image_key is not None

    @classmethod
    def completed(cls, given: Tree) -> Tree:
        """The given settings; entries that a mapping leaves out get their defaults."""
        mappings: dict[str, dict[Any, Any]] = {"columns": GEO_COLUMNS, "weights": GEO_WEIGHTS}
        filled = {key: {**mappings[key], **given[key]} for key in mappings if isinstance(given.get(key), dict)}
        return super().completed(given | filled)

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.weights["country"] == 0:
            yield ".weights.country=0, but the first stages ask for nothing else; set it above 0"
        if any(later >= earlier for earlier, later in pairwise(self.tolerances_km)):
            yield (
                f".tolerances_km={list(self.tolerances_km)}, but each stage must be stricter than the one "
                "before it; write falling numbers, such as [500, 200, 100, 50, 25]"
            )

    def make(self, access: Access, seed: int) -> Environment:
        # needs an optional extra; the module raises an error without it
        from fovea_gym.environments.geospot.environment import GeoSpot

        return GeoSpot(self, access)


CaptionMetric: TypeAlias = Literal["cider", "chrf", "bleu", "judge", "reward_model"]
Level: TypeAlias = Annotated[int, Field(ge=1, le=3)]


class ShapesEnvironment(DrawnRows):
    """Rendered scenes with questions about number, colour, shape and existence."""

    name: Literal["shapes"] = "shapes"
    level: Level | Annotated[tuple[Level, ...], Field(min_length=1)] = 1
    """Difficulty. 1: one kind of object on a jittered grid; 2: with distractors; 3: with distractors, free placement
    and all sizes. A list mixes its levels in equal parts; curriculum.level_weights calls them '1' to '3'."""
    comparison_share: Fraction = 0.0
    """Share of rows with two images to compare."""
    text_share: Fraction = 0.0
    """Share of text-only rows, whose scene is described in words."""
    dev_size: RowCount = 400
    """Number of dev scenes, for early stopping of the warm-up and for evaluation during training."""
    test_size: RowCount = 800
    """Number of held-out scenes for the final table."""
    image_side_px: Annotated[int, Field(ge=32, le=8192)] = 48
    """Width and height of a scene."""

    def contradictions(self) -> Iterator[str]:
        if len(set(self.levels)) < len(self.levels):
            yield (f".level={list(self.levels)} names a level twice, but levels are mixed equally; name each once")
        if self.comparison_share + self.text_share > 1:
            yield (
                f".comparison_share={self.comparison_share:g} and .text_share="
                f"{self.text_share:g} sum to more than 1; lower one of them"
            )

    @property
    def levels(self) -> tuple[int, ...]:
        """The levels of the scenes: one level, or those of a mix."""
        return self.level if isinstance(self.level, tuple) else (self.level,)

    def make(self, access: Access, seed: int) -> Environment:
        from fovea_gym.environments.shapes.environment import Shapes

        return Shapes(self, seed)


class SmallShapesEnvironment(DrawnRows):
    """Scenes with an object too small to recognise in the picture; the model may ask for an enlarged box of it."""

    name: Literal["shapes_small"] = "shapes_small"
    zoom: bool = True
    """Let the model ask for an enlarged box of the scene, in a turn before its answer."""
    scale: Annotated[int, Field(ge=10, le=10_000)] = 1000
    """Coordinate of the right and the lower edge of the scene; Qwen3-VL gives coordinates from 0 to 1000."""
    test_size: RowCount = 600
    """Number of held-out scenes for the final table."""

    def make(self, access: Access, seed: int) -> Environment:
        from fovea_gym.environments.shapes.small import SmallShapes

        return SmallShapes(self, seed)


class Geo3kEnvironment(FileEnvironment):
    """Geometry problems with a diagram, in the public layouts of Geometry3K; the last boxed answer is graded."""

    name: Literal["geo3k"] = "geo3k"
    format_weight: Fraction | None = None
    """Share of the reward for the format of the response (default: 0.1); the rest is for the answer."""
    reward_max_val: float | None = None
    """Binary reward of a right answer (default: 1), whatever its format; cannot be combined with format_weight."""
    reward_min_val: float | None = None
    """Binary reward of a wrong answer (default: 0)."""
    think_tags: bool = False
    """Require reasoning that ends in `</think>` before the boxed answer; Instruct models do not write this tag."""
    answer_tags: bool = False
    """Grade the content of `<answer>` tags instead of a box, as R1-V and MM-Eureka do."""

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.binary_rewards is None:
            return
        low, high = self.binary_rewards
        if self.format_weight:
            yield (
                f".format_weight={self.format_weight:g} splits the reward, but .reward_max_val "
                "and reward_min_val make it binary; unset one of them"
            )
        if self.think_tags:
            yield (
                ".think_tags=true grades the format, which the binary reward of .reward_max_val "
                "and reward_min_val ignores; unset one of them"
            )
        if not low < high:
            yield (
                f".reward_min_val={low:g} is not below reward_max_val={high:g}, so a right answer "
                "would not be worth more; lower reward_min_val"
            )

    @property
    def binary_rewards(self) -> tuple[float, float] | None:
        """The rewards of a wrong and of a right answer; None if the format has a share of the reward."""
        if self.reward_max_val is None and self.reward_min_val is None:
            return None
        return self.reward_min_val or 0.0, 1.0 if self.reward_max_val is None else self.reward_max_val

    @property
    def weight_of_format(self) -> float:
        return 0.1 if self.format_weight is None else self.format_weight

    def make(self, access: Access, seed: int) -> Environment:
        from fovea_gym.environments.geo3k import Geo3k

        return Geo3k(self, access)


class VqaEnvironment(FileEnvironment):
    """Questions about images with short answers: counts, attributes, existence, yes or no, multiple choice."""

    name: Literal["vqa"] = "vqa"
    answers_key: str | None = None
    """Column with the answers of several annotators (VQA v2's `answers`), for soft accuracy; default: one answer."""
    choices_key: str | None = None
    """Column with the options of multiple choice, which are listed with letters after the question."""

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.answers_key is not None and self.choices_key is not None:
            yield (
                f".answers_key={self.answers_key} asks for soft accuracy, which does not apply to the options of "
                f".choices_key={self.choices_key}; unset one of them"
            )

    def make(self, access: Access, seed: int) -> Environment:
        from fovea_gym.environments.vqa import Vqa

        return Vqa(self, access)


class RowsEnvironment(FileEnvironment):
    """Questions about images, graded by your own reward function (`reward`); true answers may be missing."""

    name: Literal["rows"] = "rows"

    def make(self, access: Access, seed: int) -> Environment:
        from fovea_gym.environments.dataset_tasks import OwnRows

        return OwnRows(self, access, imitated=access.imitated)


class CaptionEnvironment(FileEnvironment):
    """Descriptions of images, compared with references, judged by a model, or both."""

    name: Literal["caption"] = "caption"
    references_key: str | None = None
    """Column with all references of an image; default: the true answer, which may be a list of references."""
    metric_weights: dict[CaptionMetric, PositiveFloat] = Field(default={"cider": 1.0})
    """Weights of the metrics in the reward: cider (CIDEr-D), chrf, bleu, judge and reward_model; the sections judge and
    reward_model configure the last two."""

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if not self.metric_weights:
            yield ".metric_weights is empty, so there is no reward; write {cider: 1}"

    def make(self, access: Access, seed: int) -> Environment:
        from fovea_gym.environments.caption import Caption

        for name, offered in (("judge", access.judge), ("reward_model", access.reward_model)):
            if name in self.metric_weights and offered is None:
                raise ConfigError(
                    f"{access.section}metric_weights has {name}, which is not configured; set the section {name}"
                )
        judge = access.judge if "judge" in self.metric_weights else None
        load = access.reward_model if "reward_model" in self.metric_weights else None
        model = None if load is None else load()
        return Caption(self, access, reward_model=model, judge=judge, open_image=access.open_image)


Value: TypeAlias = str | bool | int | float | None


class OwnEnvironment(EnvironmentSettings):
    """Your own environment class (docs/own.md); `environment=path/to/file.py:Class` is short for this section."""

    name: Literal["own"] = "own"
    file: Annotated[str, Field(min_length=1)]
    """The class as `path/to/file.py:Class`; paths are relative to the working directory."""
    settings: dict[str, Value] = Field(default_factory=dict)
    """Argument `settings` of the class's constructor."""

    def make(self, access: Access, seed: int) -> object:
        from fovea_gym.environments.custom.loading import load_environment

        return load_environment(self, access.section)


class SeedRows(EnvironmentSettings):
    """Settings of an environment whose rows are seeds; no seed is in two splits."""

    prompt: str = "Choose the next action."
    """Text below the first picture."""
    max_turns: Annotated[int, Field(ge=1, le=1 << 16)] = 10
    """Maximum number of actions in an episode."""
    train_size: RowCount = 1000
    """Number of training rows."""
    dev_size: RowCount = 100
    """Number of dev rows."""
    test_size: RowCount = 200
    """Number of test rows."""


class GymnasiumEnvironment(SeedRows):
    """A gymnasium environment with discrete actions, shown to the model as pictures (docs/agents.md)."""

    name: Literal["gymnasium"] = "gymnasium"
    id: Annotated[str, Field(min_length=1)]
    """The environment's id in gymnasium's registry (`FrozenLake-v1`, `module:Name-v0`), or `path/to/file.py:Class`."""
    kwargs: dict[str, Value] = Field(default_factory=dict)
    """Keyword arguments of the environment's constructor."""
    actions: tuple[Annotated[str, Field(pattern=r"^\S(.*\S)?$")], ...] = ()
    """Names of the actions in the order of their numbers, to be listed in the prompt; default: the numbers."""
    success_key: str | None = None
    """Key of the last step's `info` that is true after success; default: success is an end with a positive reward."""

    def contradictions(self) -> Iterator[str]:
        if len({action.casefold() for action in self.actions}) < len(self.actions):
            yield (
                f".actions={list(self.actions)} names an action twice, ignoring case; give every action a separate name"
            )

    def make(self, access: Access, seed: int) -> Environment:
        from fovea_gym.adapters.gymnasium import Gymnasium

        return Gymnasium(self, access.section)


class OpenEnvEnvironment(SeedRows):
    """An environment on an OpenEnv server (docs/agents.md)."""

    name: Literal["openenv"] = "openenv"
    url: HttpUrl
    """Address of the server, such as http://127.0.0.1:8000."""
    reset: dict[str, Value] = Field(default_factory=dict)
    """Arguments of `reset` in addition to the seed."""
    action_key: str | None = None
    """Field of the action that gets the text in the model's `<action>` tag; default: the tag holds a JSON object."""
    image_keys: tuple[str, ...] = ()
    """Fields of an observation with pictures: base64, a list of base64, or values from 0 to 255 (nested, or flat with
    their shape in FIELD_shape)."""
    text_keys: tuple[str, ...] = ()
    """Fields of an observation to show as text."""

    def contradictions(self) -> Iterator[str]:
        if not (self.image_keys or self.text_keys):
            yield (
                ".image_keys and .text_keys are empty, so the model would see nothing; name fields of the observation"
            )

    def make(self, access: Access, seed: int) -> Environment:
        from fovea_gym.adapters.openenv import OpenEnv

        return OpenEnv(self, access.section)


class NemoGymEnvironment(SplitFiles):
    """Rows of NeMo-Gym; one of its resources servers runs the tools and computes the rewards (docs/agents.md)."""

    name: Literal["nemo_gym"] = "nemo_gym"
    url: HttpUrl
    """Address of the resources server, such as http://127.0.0.1:8000."""
    max_turns: Annotated[int, Field(ge=1, le=1 << 16)] = 10
    """Maximum number of answers in an episode, including those with tool calls."""

    def make(self, access: Access, seed: int) -> Environment:
        from fovea_gym.adapters.nemo_gym import NemoGym

        return NemoGym(self, access)


PartEnvironment: TypeAlias = Annotated[
    ShapesEnvironment
    | SmallShapesEnvironment
    | GroundingShapesEnvironment
    | Geo3kEnvironment
    | VqaEnvironment
    | CaptionEnvironment
    | RowsEnvironment
    | GeoSpotEnvironment
    | GroundingEnvironment
    | GymnasiumEnvironment
    | OpenEnvEnvironment
    | NemoGymEnvironment
    | OwnEnvironment
    | EnvironmentSettings,
    OpenUnion("fovea.environments", "make"),
]
"""Any environment that can be part of a mixture: all except a mixture (`fovea_gym.settings.environments`)."""


class MixturePart(Section):
    """One data set of a mixture: how often its rows are sampled, and its environment."""

    share: PositiveFloat = 1.0
    """How often rows of this part are sampled, relative to the shares of the other parts, however many rows it has."""
    environment: PartEnvironment = Field(default_factory=ShapesEnvironment)
    """Environment of this part, with the same settings as `environment`; it cannot be a mixture."""
    reward: str | None = None
    """Your own reward function for this part, `path/to/file.py:function`, which replaces its environment's score."""

    def make(self, access: Access, seed: int) -> Part:
        """Make the part, with the graders of its environment."""
        from fovea_gym.environments.access import Part
        from fovea_gym.environments.base import Environment

        made = self.environment.made(access, seed)
        if self.reward is not None or not isinstance(made, Environment):
            raise ConfigError(
                "your own reward or environment needs the limits of a run for its score; pass Access(make_part=...)"
            )
        return Part(environment=made, grading=made.grading(), share=self.share)


class MixtureParts(Section):
    """The parts of a mixture, by names of your choice that contain no `.` and no `/`."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, MixturePart] = Field(init=False)
    entry: ClassVar[FieldInfo | None] = FieldInfo.from_annotation(MixturePart)

    @property
    def by_name(self) -> Mapping[str, MixturePart]:
        return self.__pydantic_extra__


class MixtureEnvironment(EnvironmentSettings):
    """Several data sets in one run, each with its own environment and share (docs/data.md)."""

    name: Literal["mixture"] = "mixture"
    parts: MixtureParts
    """The data sets, by name."""

    def contradictions(self) -> Iterator[str]:
        if not self.parts.by_name:
            yield ".parts is empty, so there are no rows; name at least one part"
        for name in self.parts.by_name:
            if not name or set(name) & {".", "/"}:
                yield (
                    f".parts: {name!r} cannot be part of the names of settings and question types; give the part a "
                    "name without . and /"
                )
        if self.session != SessionLimits():
            yield (
                ".session is set, but the episodes of a mixture belong to its parts; set "
                ".parts.NAME.environment.session"
            )

    def make(self, access: Access, seed: int) -> Environment:
        from fovea_gym.environments.mixture import Mixture

        return Mixture.of(self, access, seed)


EnvironmentConfig: TypeAlias = Annotated[PartEnvironment | MixtureEnvironment, OpenUnion("fovea.environments", "make")]
