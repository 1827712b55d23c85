"""Counts how often the host waits for its device: to read a result, it waits for all queued work.

A CPU does not queue work, but runs on a CPU count the same reads and so show how often they would wait for a GPU.
"""

from __future__ import annotations

from collections import Counter

from torch import Tensor

_COUNTED = Counter[str]()


def awaited(tensor: Tensor) -> Tensor:
    """Count a wait and return the tensor, which the caller then copies to the host."""
    _COUNTED["waits"] += 1
    return tensor


def host_waits() -> int:
    """Number of waits in this process so far."""
    return _COUNTED["waits"]
