"""A count of the waits of the host for its device: it reads a result, so that all queued work must be done first.

A CPU queues nothing, but its runs count the same reads, and so show how often a GPU would have been waited for.
"""

from __future__ import annotations

from collections import Counter

from torch import Tensor

_COUNTED = Counter[str]()


def awaited(tensor: Tensor) -> Tensor:
    """Count a wait; returns the tensor, which the caller copies to the host at once."""
    _COUNTED["waits"] += 1
    return tensor


def host_waits() -> int:
    """Waits of this process so far."""
    return _COUNTED["waits"]
