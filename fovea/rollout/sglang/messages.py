"""Messages between the trainer and the process that holds SGLang's engine, over a pipe that only these two have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Drawing = Mapping[str, Any]
"""One completion to draw, as the fields of SGLang's `GenerateReqInput`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The first message: what the engine is made with."""

    arguments: Mapping[str, Any]
    """SGLang's server arguments."""
    authkey: bytes
    """Key by which the engine's processes may fetch tensors in shared memory from the trainer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call of a method of `host.Host`."""

    number: int
    """Number of the call, which its answer has too."""
    method: str
    arguments: Sequence[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The end of a call; number 0 is that of `Start`."""

    number: int
    value: Any = None
    error: str | None = None
    """Text of the exception that ended the call."""
