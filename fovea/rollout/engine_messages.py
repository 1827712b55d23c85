"""Messages between the trainer and the process that holds an engine, over a pipe that only these two have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fovea.errors import FoveaError


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The first message: what the engine is made with."""

    arguments: Any
    """The process knows what they are."""
    authkey: bytes
    """Key by which the engine's processes may fetch tensors in shared memory from the trainer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call of a method of what the process serves."""

    number: int
    """Number of the call, which its answer has too."""
    method: str
    arguments: Sequence[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The end of a call; number 0 is that of `Start`."""

    number: int
    value: Any = None
    error: FoveaError | None = None
    """The exception that ended the call."""
