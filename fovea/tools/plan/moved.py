"""One kind of traffic of a step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """Bytes that a step moves for one purpose."""

    what: str
    num_bytes: int
    """Bytes per step: received by each GPU, or sent by the driver to all processes."""
    by_driver: bool = False
