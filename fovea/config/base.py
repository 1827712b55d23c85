"""What every section of the settings is made of (`fovea.config.run`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, ClassVar, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

Fraction: TypeAlias = Annotated[float, Field(ge=0, le=1)]
PositiveInt: TypeAlias = Annotated[int, Field(ge=1)]
NonNegativeInt: TypeAlias = Annotated[int, Field(ge=0)]
PositiveFloat: TypeAlias = Annotated[float, Field(gt=0)]
NonNegativeFloat: TypeAlias = Annotated[float, Field(ge=0)]


class Section(BaseModel):
    """A frozen group of settings that refuses keys it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    aliases: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Names that people know, and the settings that each stands for."""
    bundles: ClassVar[Mapping[str, Mapping[str, object]]] = {}
    """By the section's `name`, the settings that choosing it sets."""
    follow_the_name: ClassVar[tuple[str, ...]] = ()
    """Settings whose default depends on it."""


def refuse(complaints: Iterable[str]) -> None:
    """ValueError with the first complaint, if there is one."""
    for complaint in complaints:
        raise ValueError(complaint)
