"""What a grader says of one answer, for a run and for answers graded offline alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Gradable: TypeAlias = Literal["geo3k", "vqa", "caption", "geospot", "shapes"]
"""Environments whose answers can be graded offline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """A whole response against the truth."""

    score: float
    """0..1, before any weights of a reward."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """What it is made of."""
    reason: str = ""
    """One line: what was read, and why it scores so."""


def shown(text: str, limit: int = 60) -> str:
    """A model's text in one short line."""
    return repr(text if len(text) <= limit else f"{text[:limit]}...")
