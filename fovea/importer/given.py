"""Settings of another system as they were found: in YAML, in a script, or on a command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from fovea.config.type_text import show

SHOWN_VARIABLES: Final = frozenset({"HOME", "USER", "PWD"})
"""Variables of the environment that a recipe may show; the value of any other may be a key or a password."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unread:
    """A value that cannot be known from what was read, such as a variable that nobody sets."""

    text: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """One setting of another system."""

    key: str
    value: Any
    """A plain value, or `Unread`; text may hold `${...}`."""
    where: str
    """File and line, or the command line."""

    @property
    def text(self) -> str:
        """The setting as one line."""
        return f"{self.key}={self.value.text if isinstance(self.value, Unread) else show(self.value)}"
