"""Maps of Europe with a mark at one of 26 cities, each in another country, with its region.

The maps of `maps.py` are centred near the mark, so only the shape of coasts and borders shows where it is. Here the
position of the mark in the picture shows it, which a tiny model learns in minutes. Train, validation and test files
have the same cities but no identical drawing: the mark moves by up to a pixel, and tints and noise differ. With
`move_degrees` the map moves from picture to picture, and the position of the mark on the land shows where it is. With
`hold_out_places` the marks are at any city of these countries, and a tenth of these cities are only in the test file;
the model then answers with country and coordinates, since nobody can name an unseen place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from fovea_gym.environments.geospot.gazetteer import LatLon
from fovea_tools.data_sets.maps import (
    SCHEMA,
    MapCity,
    MapView,
    World,
    draw_mark,
    is_test,
    load_world,
    map_cities,
    row_of,
    tinted,
)
from fovea_tools.data_sets.scenes import SHARES, write_sampled

_CENTRE, _WIDTH_DEGREES = LatLon(51, 14), 56.0
_TINT, _NOISE, _MARK_MOVES_PX = 12, 4, 1.0
_PLACES_PER_COUNTRY = 40
REGIONS = {
    745044: "Istanbul",
    524901: "Moscow",
    2643743: "England",
    2950159: "Berlin",
    3117735: "Madrid",
    703448: "Kyiv",
    2507480: "Alger",
    3169070: "Lazio",
    2988507: "Île-de-France",
    170063: "Aleppo",
    683506: "București",
    625144: "Minsk",
    756135: "Mazowieckie",
    2761369: "Wien",
    2673730: "Stockholm",
    3067696: "Praha",
    2618425: "Hovedstaden",
    727011: "Sofia",
    3143244: "Oslo",
    2964574: "Leinster",
    456172: "Rīga",
    264371: "Attica",
    2267057: "Lisboa",
    658225: "Uusimaa",
    2464470: "Tunis",
    792680: "Belgrade",
}
"""The region of each city, by GeoNames' id; on a map of 64 pixels the marks are at least 4 pixels apart."""


def europe_cities() -> list[MapCity]:
    """The cities, in order of their ids."""
    cities = [replace(city, region=REGIONS[city.id]) for city in map_cities() if city.id in REGIONS]
    return sorted(cities, key=lambda city: city.id)


def held_out_cities(view: MapView) -> dict[str, list[MapCity]]:
    """By split, unnamed cities of the same countries, a few of each; those of the test split are in no other."""
    by_country: dict[str, dict[LatLon, MapCity]] = {city.country: {} for city in europe_cities()}
    for city in map_cities():
        if city.country in by_country and view.shows(city.at):
            by_country[city.country][city.at] = replace(city, name=None, region=None)
    all_of = [list(own.values()) for own in by_country.values()]
    some = [city for own in all_of for city in own[:: max(len(own) // _PLACES_PER_COUNTRY, 1)]]
    return {split: [city for city in some if is_test(city) == (split == "test")] for split in SHARES}


def write_europe(
    folder: Path,
    *,
    num_rows: int,
    seed: int,
    image_side_px: int,
    hold_out_places: bool = False,
    move_degrees: float = 0.0,
) -> Iterator[Path]:
    """Write train, validation (a twentieth) and test (a tenth) files, equal for equal arguments; yield each."""
    window = _Window(side_px=image_side_px, move_degrees=move_degrees)
    cities = held_out_cities(window.at(0, 0)) if hold_out_places else dict.fromkeys(SHARES, europe_cities())
    world = load_world()

    def draw(split: str, _index: int, rng: np.random.Generator) -> tuple[bytes, dict[str, object]]:
        city = cities[split][rng.integers(len(cities[split]))]
        image = _drawing(world, window.view(city, rng), city, rng)
        return image.tobytes(), row_of(city, image, "wide")

    return write_sampled(folder, SCHEMA, draw, num_rows=num_rows, seed=seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Window:
    """The part of the world on the maps; its centre shifts by up to `move_degrees` in latitude and in longitude."""

    side_px: int
    move_degrees: float

    def at(self, north: float, east: float) -> MapView:
        """The view whose centre is shifted by this many degrees."""
        middle = LatLon(_CENTRE.lat + north, _CENTRE.lon + east)
        return MapView(middle, self.side_px, _WIDTH_DEGREES, (0.0, 0.0))

    def view(self, city: MapCity, rng: np.random.Generator) -> MapView:
        """A random view that shows the city."""
        if not self.move_degrees:
            return self.at(0, 0)
        while True:
            view = self.at(*rng.uniform(-self.move_degrees, self.move_degrees, 2))
            if view.shows(city.at):
                return view


def _drawing(world: World, view: MapView, city: MapCity, rng: np.random.Generator) -> Image.Image:
    map_YXC = tinted(view.sample(world))
    noise = rng.integers(-_TINT, _TINT + 1, 3) + rng.integers(-_NOISE, _NOISE + 1, map_YXC.shape)
    image = Image.fromarray(np.clip(map_YXC + noise, 0, 255).astype(np.uint8))
    x, y = np.array(view.pixel(city.at)) + rng.uniform(-_MARK_MOVES_PX, _MARK_MOVES_PX, 2)
    draw_mark(ImageDraw.Draw(image), x, y, image.width)
    return image
