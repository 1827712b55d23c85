"""Locator maps: a part of the world in the tints of its countries, its larger towns, and a mark at the place asked for.

Axes: `Y`, `X` pixels; `C` colour channels.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from fovea.environments.geospot.gazetteer import LatLon
from fovea.environments.geospot.world import CELLS_PER_DEGREE, World

_SEA = (150, 188, 220)
_BORDER = (112, 100, 96)
_COAST = (72, 96, 124)
_TOWN = (92, 84, 80)
_MARK = (214, 24, 40)
_SUPERSAMPLING = 2
_TOWNS_PER_MAP = 25
_MAX_COUNTRIES = 300


def draw_map(
    world: World, at: LatLon, *, side_px: int, width_degrees: float, shift: tuple[float, float]
) -> Image.Image:
    """A square map `width_degrees` wide at its middle; `shift` moves the mark off the middle, in halves of the map."""
    side = side_px * _SUPERSAMPLING
    view = _View(at, side, width_degrees, shift)
    country_YX = view.sample(world)
    image = Image.fromarray(_tinted(country_YX))
    draw = ImageDraw.Draw(image)
    for x, y in view.towns(world):
        _dot(draw, x, y, side / 120, _TOWN)
    x, y = view.pixel(at)
    _dot(draw, x, y, side / 22, (255, 255, 255))
    _dot(draw, x, y, side / 30, _MARK)
    return image.resize((side_px, side_px), Image.Resampling.LANCZOS)


class _View:
    """The part of the world that a map shows: equirectangular, true to shape at its middle."""

    def __init__(self, at: LatLon, side: int, width_degrees: float, shift: tuple[float, float]) -> None:
        squeeze = max(np.cos(np.radians(at.lat)), 0.2)
        self._side = side
        self._lat_per_pixel = width_degrees * squeeze / side
        self._lon_per_pixel = width_degrees / side
        half = side / 2
        self._north = at.lat + (1 + shift[1]) * half * self._lat_per_pixel
        self._west = at.lon - (1 + shift[0]) * half * self._lon_per_pixel

    def pixel(self, at: LatLon) -> tuple[float, float]:
        dlon = (at.lon - self._west + 180) % 360 - 180
        return dlon / self._lon_per_pixel, (self._north - at.lat) / self._lat_per_pixel

    def sample(self, world: World) -> NDArray[np.int16]:
        """The country of every pixel, or sea, as beyond the poles."""
        middles = np.arange(self._side) + 0.5
        rows_Y = np.floor((90 - (self._north - middles * self._lat_per_pixel)) * CELLS_PER_DEGREE).astype(int)
        columns_X = np.floor((self._west + middles * self._lon_per_pixel + 180) * CELLS_PER_DEGREE).astype(int)
        height, width = world.country_YX.shape
        inside_Y = np.clip(rows_Y, 0, height - 1)
        country_YX: NDArray[np.int16] = world.country_YX[inside_Y[:, None], columns_X[None, :] % width]
        country_YX[(rows_Y < 0) | (rows_Y >= height)] = -1
        return country_YX

    def towns(self, world: World) -> list[tuple[float, float]]:
        """The largest towns in view."""
        lat_P, lon_P = world.lat_P[world.largest_P], world.lon_P[world.largest_P]
        dlon_P = (lon_P - self._west + 180) % 360 - 180
        x_P, y_P = dlon_P / self._lon_per_pixel, (self._north - lat_P) / self._lat_per_pixel
        seen = np.flatnonzero((x_P >= 0) & (x_P < self._side) & (y_P >= 0) & (y_P < self._side))[:_TOWNS_PER_MAP]
        return [(float(x_P[place]), float(y_P[place])) for place in seen]


def _tinted(country_YX: NDArray[np.int16]) -> NDArray[np.uint8]:
    """The pixels in the tints of their countries, with a line where two meet and a darker one at the sea."""
    picture_YXC = _TINTS[country_YX]
    for axis in (0, 1):
        other_YX = np.roll(country_YX, 1, axis)
        edge_YX = country_YX != other_YX
        edge_YX.swapaxes(0, axis)[0] = False  # rolled in from the far side
        picture_YXC[edge_YX] = _BORDER
        picture_YXC[edge_YX & (np.minimum(country_YX, other_YX) < 0)] = _COAST
    return picture_YXC


def _tint(number: int) -> list[float]:
    """A light colour of a country's own; numbers side by side are far apart."""
    hue = number * 0.618034
    return [214 + 38 * np.cos(2 * np.pi * (hue + third / 3)) for third in range(3)]


_TINTS = np.array([*(_tint(number) for number in range(_MAX_COUNTRIES)), _SEA]).astype(np.uint8)
"""Colours by country number; the last one, -1, is the sea."""


def _dot(draw: ImageDraw.ImageDraw, x: float, y: float, radius: float, colour: tuple[int, int, int]) -> None:
    draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)
