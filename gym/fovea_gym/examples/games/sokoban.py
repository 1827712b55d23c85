"""Sokoban: push the boxes of a room onto targets; boards use the characters of the usual level files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fovea_gym.examples.games.board import Action, Cell, cells_of, neighbour

TASK = "Push the boxes onto the targets."
_WALL_SHARE = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Sokoban:
    """A room, its boxes and the player."""

    room: tuple[str, ...]
    """Walls #, targets . and floor -, without the boxes and the player."""
    boxes: frozenset[Cell]
    player: Cell

    @classmethod
    def read(cls, lines: Sequence[str]) -> Sokoban:
        """Read a level: # wall, - floor, . target, $ box, * box on a target, @ player, + player on a target."""
        room = str.maketrans({"$": "-", "@": "-", "*": ".", "+": "."})
        (player,) = cells_of(lines, "@+")
        return cls(
            room=tuple(line.translate(room) for line in lines),
            boxes=frozenset(cells_of(lines, "$*")),
            player=player,
        )

    @property
    def lines(self) -> tuple[str, ...]:
        return tuple(
            "".join(self._shown((row, column), under) for column, under in enumerate(line))
            for row, line in enumerate(self.room)
        )

    @property
    def is_solved(self) -> bool:
        return all(self._under(box) == "." for box in self.boxes)

    @property
    def is_lost(self) -> bool:
        # a box in a corner stays there, but the player may still walk
        return False

    def after(self, action: Action) -> Sokoban:
        there = neighbour(self.player, action)
        if self._under(there) == "#":
            return self
        if there not in self.boxes:
            return replace(self, player=there)
        beyond = neighbour(there, action)
        if self._under(beyond) == "#" or beyond in self.boxes:
            return self
        return replace(self, player=there, boxes=self.boxes - {there} | {beyond})

    def _under(self, cell: Cell) -> str:
        return self.room[cell[0]][cell[1]]

    def _shown(self, cell: Cell, under: str) -> str:
        if cell == self.player:
            return "+" if under == "." else "@"
        if cell in self.boxes:
            return "*" if under == "." else "$"
        return under


def random_level(side: int, num_boxes: int, rng: np.random.Generator) -> tuple[str, ...]:
    """A walled room with some walls inside, boxes, targets and the player at random; it may have no solution."""
    inner = side - 2
    cells = np.where(rng.random(inner * inner) < _WALL_SHARE, "#", "-")
    places = rng.choice(inner * inner, size=2 * num_boxes + 1, replace=False)
    cells[places[0]], cells[places[1 : num_boxes + 1]], cells[places[num_boxes + 1 :]] = "@", "$", "."
    wall = "#" * side
    return (wall, *(f"#{''.join(row)}#" for row in cells.reshape(inner, inner)), wall)
