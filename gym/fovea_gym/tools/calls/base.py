"""The protocol of a format in which a model family writes calls of tools."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from fovea_gym.types import ToolCall, ToolSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class BadCall:
    """A call that cannot be read."""

    problem: str
    """The cause and the right form, in one line for the model."""


class CallFormat(Protocol):
    """A format of calls, as a family's chat template writes them."""

    @property
    def name(self) -> str:
        """Name for messages and documentation."""
        ...

    def parse(self, text: str, tools: Sequence[ToolSpec]) -> Sequence[ToolCall | BadCall]:
        """The calls in the text of a completion, in order; `tools` say which types the arguments have."""
        ...

    def written(self, text: str, calls: Sequence[ToolCall]) -> str:
        """An answer that begins with this text and makes these calls, as the chat template writes it."""
        ...


def after_thinking(text: str) -> str:
    """The text after the reasoning; a call within it is a thought."""
    return text.rpartition("</think>")[2]


def blocks(text: str, opening: str, closing: str) -> Iterator[str]:
    """Contents of the blocks between two marks; the last may lack its closing mark."""
    pattern = rf"{re.escape(opening)}(.*?)(?:{re.escape(closing)}|\Z)"
    return (found[1] for found in re.finditer(pattern, text, re.DOTALL))
