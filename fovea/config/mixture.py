"""Settings of a mixture, several environments in one run, and the union of all environments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

from fovea.config.base import OpenUnion, PositiveFloat, Section
from fovea.config.environments import PartEnvironment, ShapesEnvironment
from fovea.config.splits import EnvironmentSettings


class MixturePart(Section):
    """One data set of a mixture: how often it is drawn, and the settings that a run of it alone would have."""

    share: PositiveFloat = 1.0
    """How often rows of this part are drawn, relative to the shares of the other parts, however many rows it has."""
    environment: PartEnvironment = Field(default_factory=ShapesEnvironment)
    """Environment of this part, with the settings of `environment`; no mixture."""
    reward: str | None = None
    """Reward function of your own for this part, `path/to/file.py:function`, in place of its environment's score."""


class MixtureParts(Section):
    """The parts of a mixture, by names of your choice, without `.` and `/`."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, MixturePart] = Field(init=False)
    entry: ClassVar[FieldInfo | None] = FieldInfo.from_annotation(MixturePart)

    @property
    def by_name(self) -> Mapping[str, MixturePart]:
        return self.__pydantic_extra__

    @model_validator(mode="after")
    def _names_fit(self) -> MixtureParts:
        if not self.by_name:
            raise ValueError("environment.parts is empty, so that there are no rows; name a part or more")
        for name in self.by_name:
            if not name or set(name) & {".", "/"}:
                raise ValueError(
                    f"environment.parts: {name!r} does not fit in the names of settings and of question types; give "
                    "the part a name without . and /"
                )
        return self


class MixtureEnvironment(EnvironmentSettings):
    """Several data sets in one run, each with its own environment and share (docs/data.md)."""

    name: Literal["mixture"] = "mixture"
    parts: MixtureParts
    """The data sets, by name."""


EnvironmentConfig: TypeAlias = Annotated[
    PartEnvironment | MixtureEnvironment, OpenUnion("fovea.environments", "make_environment")
]
