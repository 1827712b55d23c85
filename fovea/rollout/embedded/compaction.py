"""Dense rows: when some end, the last live ones move into their places, and nothing else is copied.

Axes: `X` rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """Row `sources[i]` goes to row `targets[i]`; of all rows the first `count` stay."""

    sources: tuple[int, ...]
    targets: tuple[int, ...]
    count: int

    def index(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Sources and targets as index tensors."""
        sources, targets = torch.tensor([self.sources, self.targets], dtype=torch.long, device=device)
        return sources, targets

    def in_list(self, rows: list[Row]) -> None:
        """Move the entries of a list, and drop its end."""
        for source, target in zip(self.sources, self.targets, strict=True):
            rows[target] = rows[source]
        del rows[self.count :]


def fill_holes(count: int, ended: Sequence[int]) -> Moves:
    """How `count` rows stay dense when these end."""
    left = count - len(ended)
    gone = set(ended)
    return Moves(
        sources=tuple(row for row in range(left, count) if row not in gone),
        targets=tuple(row for row in ended if row < left),
        count=left,
    )


def grown(capacity: int, needed: int) -> int:
    """Room at least doubles when it grows, so that a row is copied a bounded number of times on average."""
    return capacity if needed <= capacity else max(needed, 2 * capacity)
