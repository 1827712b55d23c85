"""The state of a game on a board, and the shortest way to solve it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Literal, Protocol, TypeAlias, get_args

Action: TypeAlias = Literal["Left", "Down", "Right", "Up"]
ACTIONS: tuple[Action, ...] = get_args(Action)
"""The moves in the order of gymnasium's FrozenLake, where they are numbered 0 to 3."""
Cell: TypeAlias = tuple[int, int]
"""Row and column, from the top left."""
_STEPS: dict[Action, Cell] = {"Left": (0, -1), "Down": (1, 0), "Right": (0, 1), "Up": (-1, 0)}


class Board(Protocol):
    """A state of a game; immutable, and hashable for the search."""

    @property
    def lines(self) -> tuple[str, ...]:
        """The board in characters, a string for each row of cells."""
        ...

    @property
    def is_solved(self) -> bool: ...

    @property
    def is_lost(self) -> bool:
        """True if no move is possible any more."""
        ...

    def after(self, action: Action) -> Board:
        """The board after a move; the same board if something is in the way."""
        ...


def neighbour(cell: Cell, action: Action) -> Cell:
    """The cell next to this one in the direction of a move."""
    down, right = _STEPS[action]
    return cell[0] + down, cell[1] + right


def solution(board: Board, max_moves: int) -> tuple[Action, ...] | None:
    """A shortest sequence of moves that solves the board, by breadth-first search; None if it exceeds `max_moves`."""
    found: dict[Board, tuple[Action, ...]] = {board: ()}
    waiting = deque([board])
    while waiting:
        here = waiting.popleft()
        if here.is_solved:
            return found[here]
        if here.is_lost or len(found[here]) == max_moves:
            continue
        for action in ACTIONS:
            there = here.after(action)
            if there not in found:
                found[there] = (*found[here], action)
                waiting.append(there)
    return None


def cells_of(lines: Sequence[str], characters: str) -> list[Cell]:
    """The cells of a board that hold one of these characters, row by row."""
    return [
        (row, column)
        for row, line in enumerate(lines)
        for column, character in enumerate(line)
        if character in characters
    ]
