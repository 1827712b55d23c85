"""Pictures of boards, with a tile for each character. Axes: `Y`, `X` pixels, `C` colour channels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

Colour: TypeAlias = tuple[int, int, int]
CELL_PX = 16
"""Side of a tile: one visual token of the tiny models; model.min_pixels enlarges a board for others."""
_ICE, _FLOOR, _WALL = (205, 228, 245), (225, 214, 190), (96, 70, 58)
_WATER, _GOLD, _RED, _GREEN, _WOOD = (25, 45, 95), (240, 190, 30), (210, 45, 45), (40, 150, 70), (165, 105, 45)


@dataclass(frozen=True, slots=True)
class _Mark:
    """A shape in the middle of a tile; its reach is in shares of half a tile."""

    shape: Literal["disc", "square", "ring"]
    colour: Colour
    reach: float


_HOLE, _GOAL = _Mark("disc", _WATER, 0.85), _Mark("square", _GOLD, 0.7)
_PLAYER, _BOX, _TARGET = _Mark("disc", _RED, 0.55), _Mark("square", _WOOD, 0.75), _Mark("ring", _GREEN, 0.85)
_TILES: dict[str, tuple[Colour, tuple[_Mark, ...]]] = {
    "F": (_ICE, ()),
    "H": (_ICE, (_HOLE,)),
    "G": (_ICE, (_GOAL,)),
    "P": (_ICE, (_PLAYER,)),
    "X": (_ICE, (_HOLE, _PLAYER)),
    "V": (_ICE, (_GOAL, _PLAYER)),
    "#": (_WALL, ()),
    "-": (_FLOOR, ()),
    ".": (_FLOOR, (_TARGET,)),
    "$": (_FLOOR, (_BOX,)),
    "*": (_FLOOR, (_BOX, _TARGET)),
    "@": (_FLOOR, (_PLAYER,)),
    "+": (_FLOOR, (_TARGET, _PLAYER)),
}
"""Ground and marks of each character; the last mark is on top."""


def draw(lines: Sequence[str]) -> NDArray[np.uint8]:
    """The picture of a board."""
    rows = [np.concatenate([_tile(character) for character in line], axis=1) for line in lines]
    return np.concatenate(rows, axis=0)


@lru_cache(maxsize=256)
def _tile(character: str) -> NDArray[np.uint8]:
    ground, marks = _TILES[character]
    tile_YXC = np.empty((CELL_PX, CELL_PX, 3), dtype=np.float64)
    tile_YXC[:] = ground
    # a darker edge tells neighbouring cells apart
    tile_YXC[-1] *= 0.85
    tile_YXC[:, -1] *= 0.85
    for mark in marks:
        cover_YX = _cover(mark)[:, :, None]
        tile_YXC += cover_YX * (np.asarray(mark.colour) - tile_YXC)
    return tile_YXC.round().astype(np.uint8)


def _cover(mark: _Mark) -> NDArray[np.float64]:
    """Share of each pixel that a mark covers: 1 inside, 0 outside, between them at its edge."""
    half = CELL_PX / 2
    offsets = np.arange(CELL_PX) + 0.5 - half
    if mark.shape == "square":
        distance_YX = np.maximum(np.abs(offsets)[:, None], np.abs(offsets)[None, :]) - mark.reach * half
    else:
        distance_YX = np.hypot(offsets[:, None], offsets[None, :]) - mark.reach * half
    if mark.shape == "ring":
        thickness = 0.2 * half
        distance_YX = np.abs(distance_YX + thickness) - thickness
    cover_YX: NDArray[np.float64] = np.clip(0.5 - distance_YX, 0, 1)
    return cover_YX
