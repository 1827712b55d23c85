"""The stages of an environment's curriculum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The name and figures with which logs describe a stage."""

    name: str
    facts: Mapping[str, float] = field(default_factory=dict)
    """Its weights and tolerances, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """The stages of an environment; by default it has none."""

    stages: Sequence[Stage] = ()
    """From the easiest to the last."""
    default_starts: Sequence[int] = ()
    """Steps at which the second and later stages begin."""


def stages_of(environment: object) -> Stages:
    """The stages of an environment, which need not derive from `Environment`; most have none."""
    stages, starts = getattr(environment, "stages", ()), getattr(environment, "default_starts", ())
    return Stages(stages=tuple(stages), default_starts=tuple(starts))
