"""Small scenes of plain shapes, drawn with anti-aliasing by their distance fields.

Lengths are in units of a 48-pixel image and scale with its side. Axes: `Y`, `X` pixels, `C` colour channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from fovea_gym.environments.base import Split
from fovea_gym.environments.hash_splits import split_of

Shape: TypeAlias = Literal["circle", "square", "triangle"]
Colour: TypeAlias = Literal["red", "green", "blue", "yellow"]
SHAPES: tuple[Shape, ...] = get_args(Shape)
COLOURS: tuple[Colour, ...] = get_args(Colour)

_RGB = {"red": (220, 45, 40), "green": (40, 175, 65), "blue": (45, 80, 225), "yellow": (235, 210, 45)}
UNIT_SIDE = 48
_CELL = 16.0
_GRID_RADII = (5.8, 7.4)
_FREE_RADII = (4.5, 10.5)
# How far an object may reach over the edge of its cell.
_SLACK = 0.5
_TRIES_PER_OBJECT = 40
_NOISE_STD = 3.0
_SQUARE_SIDE = 0.92
"""Side of a square, relative to the diameter of its spot, so that its area is close to that of a circle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Thing:
    """One object, not yet placed."""

    shape: Shape
    colour: Colour


@dataclass(frozen=True, slots=True)
class Spot:
    """Centre and radius of a placed object."""

    x: float
    y: float
    radius: float


def draw(things: Sequence[Thing], side_px: int, rng: np.random.Generator, *, free: bool) -> NDArray[np.float32]:
    """The pixels of a scene without noise, on a dark background; `free` places objects anywhere, else on a 3x3 grid."""
    return paint(things, (free_spots if free else grid_spots)(len(things), rng), side_px, rng)


def paint(
    things: Sequence[Thing], spots: Sequence[Spot], side_px: int, rng: np.random.Generator
) -> NDArray[np.float32]:
    """The pixels of things at these spots, without noise, on a dark background."""
    scale = side_px / UNIT_SIDE
    canvas_YXC = _background(side_px, rng)
    for thing, spot in zip(things, spots, strict=True):
        placed = Spot(spot.x * scale, spot.y * scale, spot.radius * scale)
        _paint(canvas_YXC, thing.shape, _shade(thing.colour, rng), placed)
    return canvas_YXC


def with_noise(canvas_YXC: NDArray[np.float32], split: Split, rng: np.random.Generator) -> NDArray[np.uint8]:
    """The canvas with camera noise, which is sampled again until the pixels belong to the split."""
    while True:
        noise_YXC = rng.standard_normal(canvas_YXC.shape, dtype=np.float32) * _NOISE_STD
        pixels_YXC = np.clip(canvas_YXC + noise_YXC, 0, 255).astype(np.uint8)
        if split_of(pixels_YXC.tobytes()) == split:
            return pixels_YXC


def grid_spots(n: int, rng: np.random.Generator) -> list[Spot]:
    cells_per_side = int(UNIT_SIDE // _CELL)
    spots = []
    for cell in rng.permutation(cells_per_side**2)[:n]:
        row, column = divmod(int(cell), cells_per_side)
        radius = rng.uniform(*_GRID_RADII)
        reach = _CELL / 2 - radius + _SLACK
        dx, dy = rng.uniform(-reach, reach, 2)
        spots.append(Spot((column + 0.5) * _CELL + dx, (row + 0.5) * _CELL + dy, radius))
    return spots


def free_spots(n: int, rng: np.random.Generator) -> list[Spot]:
    smallest, largest = _FREE_RADII
    while True:
        spots: list[Spot] = []
        for _ in range(n * _TRIES_PER_OBJECT):
            spot = _random_spot(rng, smallest, largest)
            if all(_apart(spot, other) for other in spots):
                spots.append(spot)
            if len(spots) == n:
                return spots
        # no room left: try again with smaller objects
        largest = max(smallest + 0.2, largest - 0.5)


def box_of(thing: Thing, spot: Spot) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of the box around a thing at a spot."""
    reach = spot.radius * (_SQUARE_SIDE if thing.shape == "square" else 1)
    return spot.x - reach, spot.y - reach, spot.x + reach, spot.y + reach


def _random_spot(rng: np.random.Generator, smallest: float, largest: float) -> Spot:
    radius = rng.uniform(smallest, largest)
    x, y = rng.uniform(radius + _SLACK, UNIT_SIDE - radius - _SLACK, 2)
    return Spot(x, y, radius)


def _apart(one: Spot, other: Spot) -> bool:
    return max(abs(one.x - other.x), abs(one.y - other.y)) > one.radius + other.radius + 1


def _background(side_px: int, rng: np.random.Generator) -> NDArray[np.float32]:
    colour_C = rng.uniform(20, 70) + rng.uniform(-10, 10, 3)
    slope_x, slope_y = rng.uniform(-12, 12, 2)
    ramp = (np.arange(side_px, dtype=np.float32) + 0.5) / side_px - 0.5
    light_YX = slope_y * ramp[:, None] + slope_x * ramp[None, :]
    canvas_YXC: NDArray[np.float32] = (light_YX[:, :, None] + colour_C).astype(np.float32)
    return canvas_YXC


def _shade(colour: Colour, rng: np.random.Generator) -> NDArray[np.float32]:
    shade_C = np.array(_RGB[colour]) * rng.uniform(0.75, 1.08) + rng.uniform(-10, 10, 3)
    return np.clip(shade_C, 0, 255).astype(np.float32)


def _paint(canvas_YXC: NDArray[np.float32], shape: Shape, colour_C: NDArray[np.float32], spot: Spot) -> None:
    rows, columns = (_window(centre, spot.radius, len(canvas_YXC)) for centre in (spot.y, spot.x))
    dy = np.arange(rows.start, rows.stop, dtype=np.float32)[:, None] + np.float32(0.5 - spot.y)
    dx = np.arange(columns.start, columns.stop, dtype=np.float32)[None, :] + np.float32(0.5 - spot.x)
    cover_YX = np.clip(0.5 - _distance(shape, dx, dy, spot.radius), 0, 1)[:, :, None]
    part_YXC = canvas_YXC[rows, columns]
    part_YXC += cover_YX * (colour_C - part_YXC)


def _window(centre: float, radius: float, side_px: int) -> slice:
    """The pixels along one axis that an object can touch, including its anti-aliased edge."""
    return slice(max(int(centre - radius) - 1, 0), min(int(centre + radius) + 2, side_px))


def _distance(shape: Shape, dx: NDArray[np.float32], dy: NDArray[np.float32], radius: float) -> NDArray[np.float32]:
    """The signed distance in pixels from the edge of a shape, negative inside."""
    r = np.float32(radius)
    distance_YX: NDArray[np.float32]
    if shape == "circle":
        distance_YX = np.sqrt(dx * dx + dy * dy) - r
    elif shape == "square":
        distance_YX = np.maximum(np.abs(dx), np.abs(dy)) - r * np.float32(_SQUARE_SIDE)
    else:
        # base at the bottom, as wide as high: the normals of the sides are (2, -1) / sqrt(5)
        distance_YX = np.maximum(dy - r, (2 * np.abs(dx) - (dy + r)) / np.float32(math.sqrt(5)))
    return distance_YX
