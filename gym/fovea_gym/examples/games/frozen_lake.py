"""FrozenLake without slipping, with the rules and letters of gymnasium's FrozenLake-v1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fovea_gym.examples.games.board import Action, Cell, cells_of, neighbour

TASK = "Walk to the goal, not into a hole."


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenLake:
    """A lake and the player on it."""

    ice: tuple[str, ...]
    """The lake without the player: F ice, H hole, G goal."""
    player: Cell

    @classmethod
    def read(cls, lines: Sequence[str]) -> FrozenLake:
        """Read a map in gymnasium's format, with its start S."""
        (start,) = cells_of(lines, "S")
        return cls(ice=tuple(line.replace("S", "F") for line in lines), player=start)

    @property
    def lines(self) -> tuple[str, ...]:
        """The lake with the player: P, X in a hole, V on the goal."""
        row, column = self.player
        shown = {"F": "P", "H": "X", "G": "V"}[self._under]
        line = self.ice[row]
        return (*self.ice[:row], line[:column] + shown + line[column + 1 :], *self.ice[row + 1 :])

    @property
    def is_solved(self) -> bool:
        return self._under == "G"

    @property
    def is_lost(self) -> bool:
        return self._under == "H"

    def after(self, action: Action) -> FrozenLake:
        row, column = neighbour(self.player, action)
        is_inside = 0 <= row < len(self.ice) and 0 <= column < len(self.ice[0])
        return replace(self, player=(row, column)) if is_inside and not (self.is_solved or self.is_lost) else self

    @property
    def _under(self) -> str:
        return self.ice[self.player[0]][self.player[1]]


def random_lake(side: int, frozen_share: float, rng: np.random.Generator) -> tuple[str, ...]:
    """A map of independent cells, with start and goal at two of them; there may be no path between them."""
    cells = np.where(rng.random(side * side) < frozen_share, "F", "H")
    start, goal = rng.choice(side * side, size=2, replace=False)
    cells[start], cells[goal] = "S", "G"
    return tuple("".join(row) for row in cells.reshape(side, side))
