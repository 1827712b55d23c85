"""The interface of the KV cache.

Axes: `B` rows of the decode batch, `J` key heads, `D` width of a head, `N` tokens of a prefill pass, `M` tokens that a
pass attends to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from torch import Tensor

from fovea.models.decoder import Attend
from fovea.models.transfer import to_device
from fovea.rollout.embedded.requests import QueuedRequest

if TYPE_CHECKING:
    from fovea.rollout.embedded.states import DeltaStates

Entry = TypeVar("Entry")


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """A compaction: row `sources[i]` moves to row `targets[i]`, and only the first `count` rows are kept."""

    sources: tuple[int, ...]
    targets: tuple[int, ...]
    count: int

    def index(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return sources and targets as index tensors on a device."""
        # one tensor needs only one transfer
        sources, targets = to_device(torch.tensor([self.sources, self.targets], dtype=torch.long), device)
        return sources, targets

    def in_list(self, rows: list[Entry]) -> None:
        """Compact a list with one entry per row."""
        for source, target in zip(self.sources, self.targets, strict=True):
            rows[target] = rows[source]
        del rows[self.count :]


def fill_holes(count: int, finished: Sequence[int]) -> Moves:
    """Compute the compaction of `count` rows after the given ones have finished."""
    # the last rows fill the holes, so that few rows move and the others keep their index
    left = count - len(finished)
    gone = set(finished)
    # there are as many running rows from `left` on as holes before it; sources and targets never overlap
    return Moves(
        sources=tuple(row for row in range(left, count) if row not in gone),
        targets=tuple(row for row in finished if row < left),
        count=left,
    )


def grown_capacity(capacity: int, needed: int) -> int:
    """Capacity for `needed` entries: unchanged if it suffices, else at least doubled."""
    # doubling keeps the average number of copies per row constant
    return capacity if needed <= capacity else max(needed, 2 * capacity)


Store = Callable[[int, Tensor, Tensor], None]
"""Writes the keys and values of a prefill pass: (layer, keys [N, J, D], values [N, J, D])."""


Load = Callable[[int], tuple[Tensor, Tensor]]
"""Keys and values [M, J, D] of the M tokens that a prefill pass attends to, in a layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSpan:
    """The tokens from `start` to `end` of one prompt in the cache."""

    prompt: int
    """Index of the prompt among those in the cache."""
    start: int
    end: int


class Cache(Protocol):
    """Keys and values of prompts and rows, in the order of `add`; `remove` compacts them (`fill_holes`)."""

    @property
    def states(self) -> DeltaStates | None:
        """Delta-net states of the same rows; None for a decoder without delta nets."""
        ...

    def cost(self, request: QueuedRequest) -> int:
        """Maximum number of cache tokens that this request can need by itself."""
        ...

    def fits(self, requests: Sequence[QueuedRequest]) -> bool:
        """True if there is room for these requests in addition to the rows in the cache."""
        ...

    def add(self, requests: Sequence[QueuedRequest]) -> int:
        """Append the requests' prompts, and n empty rows for each; returns the index of the first prompt."""
        ...

    def writer(self, spans: Sequence[TokenSpan]) -> Store:
        """Return a function that stores the keys and values of a prefill pass over these spans, layer by layer."""
        ...

    def reserve(self, tokens_B: Sequence[int]) -> bool:
        """Make room for these numbers of completion tokens; returns False without any change if memory is short."""
        ...

    def reader(self, spans: Sequence[TokenSpan]) -> Load:
        """Return a function that loads a layer of these prompts, each from its first token to the end of its span."""
        ...

    def remove(self, finished: Sequence[int]) -> None:
        """Remove finished rows, and prompts without remaining rows."""
        ...

    def copy_row(self, row: int, tokens: int) -> list[Tensor]:
        """Copy the keys and values of a row and its prompt, [2, J, prompt + tokens, D] per layer."""
        ...

    def clear(self) -> None:
        """Remove all rows and prompts."""
        ...

    def step(self, stored_B: Tensor, longest: int, level: bool) -> Attend:
        """Return the attention of a decode step: one more token per row, after `stored_B` tokens of its completion.

        `longest` is an upper bound of `stored_B` in running rows; `level` says that it is equal in all of them.
        """
        ...
