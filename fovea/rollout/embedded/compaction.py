"""Compaction of a batch: the last running rows move into the holes of finished ones, and nothing else is copied.

Axes: `X` rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from fovea.models.transfer import to_device

Entry = TypeVar("Entry")


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """A compaction: row `sources[i]` moves to row `targets[i]`, then the first `count` rows stay."""

    sources: tuple[int, ...]
    targets: tuple[int, ...]
    count: int

    def index(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Sources and targets as index tensors on a device."""
        sources, targets = to_device(torch.tensor([self.sources, self.targets], dtype=torch.long), device)
        return sources, targets

    def in_list(self, rows: list[Entry]) -> None:
        """Compact a list with one entry per row."""
        for source, target in zip(self.sources, self.targets, strict=True):
            rows[target] = rows[source]
        del rows[self.count :]


def fill_holes(count: int, finished: Sequence[int]) -> Moves:
    """The compaction of `count` rows of which these have finished."""
    left = count - len(finished)
    gone = set(finished)
    # as many running rows lie beyond `left` as holes before it; sources and targets never overlap
    return Moves(
        sources=tuple(row for row in range(left, count) if row not in gone),
        targets=tuple(row for row in finished if row < left),
        count=left,
    )


def grown_capacity(capacity: int, needed: int) -> int:
    """A capacity for `needed` entries: unchanged if it suffices, else at least doubled."""
    # doubling keeps the copies per row constant on average
    return capacity if needed <= capacity else max(needed, 2 * capacity)
