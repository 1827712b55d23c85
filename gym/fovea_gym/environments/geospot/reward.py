"""The reward of an answer: 0.3 country + 0.2 region + 0.2 city + 0.3 exp(-d / tolerance), in five stages.

d is the great-circle distance in km. A stage asks for some of the four parts; their weights are scaled to sum to 1. A
part that the answer lacks scores 0 and stays in that sum; a part that the *truth* lacks is not asked for.

The tolerance shrinks from stage to stage. In stages without coordinates, it gives partial credit for a wrong country: d
is then the distance between the centres of the two countries, and the country scores exp(-d / tolerance). With
coordinates, d is their distance, and a wrong country scores 0.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypedDict

import yaml

from fovea_gym.environments.geospot.countries import country_code, country_name
from fovea_gym.environments.geospot.gazetteer import (
    City,
    LatLon,
    cities,
    country_distance_km,
    great_circle_km,
    regions,
    spellings,
)
from fovea_gym.environments.geospot.parsing import PlaceAnswer, parse_answer
from fovea_gym.errors import BadRowError, DataError
from fovea_gym.graders.base import Grade


class _RegionTables(TypedDict):
    kinds: list[str]
    aliases: dict[str, list[str]]


_TABLES: _RegionTables = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))

KINDS_OF_REGION = frozenset(_TABLES["kinds"])
"""Folded words for kinds of regions, which are dropped from the ends of a name."""

REGION_ALIASES = {code: tuple(regions) for code, regions in _TABLES["aliases"].items()}
"""By country, the folded names of each region, separated by `|`."""


MAX_KM_TO_THE_GAZETTEER = 75.0
"""The distance beyond which a city of the same name is a different one."""
_MAX_CHARS = 200
_BEFORE_A_CITY = re.compile(r"^(?:city of )?(?:ciudad de )?(?:greater )?(?:downtown )?")


def same_region(given: str, truth: str, country: str | None) -> bool:
    """True if two names mean the same region: `Bavaria`, `Bayern`, `State of Bavaria` and `BY` do in DE."""
    return any(not _region_keys(form).isdisjoint(_region_answers(truth, country)) for form in _candidates(given))


def same_city(given: str, truth: str, country: str | None, at: LatLon | None = None) -> bool:
    """True if two names mean the same city, as `Munich` and `München`; `at`, the true point, separates namesakes."""
    return any(not _city_keys(form).isdisjoint(_city_answers(truth, country, at)) for form in _candidates(given))


def _candidates(given: str) -> Iterator[str]:
    """The names to try: the whole answer, without its parentheses, and up to its first comma (`"Sydney, NSW"`)."""
    if len(given) <= _MAX_CHARS:
        yield given
        yield given.partition("(")[0]
        yield given.partition(",")[0]


@lru_cache(maxsize=20_000)
def _region_answers(truth: str, country: str | None) -> frozenset[str]:
    own = _region_keys(truth)
    known = [each.names | {each.code.casefold()} for each in (regions(country) if country else ())]
    known += [frozenset(names.split("|")) for names in REGION_ALIASES.get(country or "", ())]
    keys = [frozenset().union(*map(_region_keys, names)) for names in known]
    return own.union(*(names for names in keys if not names.isdisjoint(own)))


@lru_cache(maxsize=100_000)
def _region_keys(name: str) -> frozenset[str]:
    return frozenset(key for spelling in spellings(name) for key in (spelling, _without_kind(spelling)) if key)


def _without_kind(name: str) -> str:
    """Reduce `province of limburg` and `limburg province` to `limburg`; a name that is only a kind stays as it is."""
    words = name.split()
    while len(words) > 1 and words[-1] in KINDS_OF_REGION:
        words.pop()
    while len(words) > 1 and words[0] in KINDS_OF_REGION:
        words.pop(0)
        if len(words) > 1 and words[0] in {"of", "de", "del", "da", "do", "di", "du", "la"}:
            words.pop(0)
    return " ".join(words)


@lru_cache(maxsize=20_000)
def _city_answers(truth: str, country: str | None, at: LatLon | None) -> frozenset[str]:
    own = _city_keys(truth)
    near = (city for city in cities().get(country or "", ()) if at is None or _is_near(city, at))
    names = (frozenset().union(*map(_city_keys, (city.name, *city.other_names))) for city in near)
    return own.union(*(keys for keys in names if not keys.isdisjoint(own)))


def _is_near(city: City, at: LatLon) -> bool:
    # compare degrees first, which is faster: most cities of a large country are far away
    return abs(city.at.lat - at.lat) < 1 and great_circle_km(city.at, at) < MAX_KM_TO_THE_GAZETTEER


@lru_cache(maxsize=100_000)
def _city_keys(name: str) -> frozenset[str]:
    return frozenset(
        key
        for spelling in spellings(name)
        for key in (spelling, spelling.removesuffix(" city"), _BEFORE_A_CITY.sub("", spelling))
        if key
    )


PARTS = ("country", "region", "city", "coordinates")
WEIGHTS: Mapping[str, float] = {"country": 0.3, "region": 0.2, "city": 0.2, "coordinates": 0.3}


@dataclass(frozen=True, slots=True, kw_only=True)
class GeoStage:
    """The parts of the place that are asked for, and the tolerance: the distance that earns 1/e of the full score."""

    name: str
    asks: tuple[str, ...]
    tolerance_km: float


STAGES = (
    GeoStage(name="country", asks=PARTS[:1], tolerance_km=500.0),
    GeoStage(name="country refined", asks=PARTS[:1], tolerance_km=200.0),
    GeoStage(name="country and region", asks=PARTS[:2], tolerance_km=100.0),
    GeoStage(name="country, region and city", asks=PARTS[:3], tolerance_km=50.0),
    GeoStage(name="all with coordinates", asks=PARTS, tolerance_km=25.0),
)
STARTS = (100, 300, 600, 1000)
"""Steps at which the second and later stages begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownPlace:
    """The place where a picture was taken, as far as it is known."""

    country: str | None = None
    """ISO 3166-1 alpha-2 code."""
    region: str | None = None
    city: str | None = None
    at: LatLon | None = None

    @property
    def known(self) -> tuple[str, ...]:
        values = (self.country, self.region, self.city, self.at)
        return tuple(part for part, value in zip(PARTS, values, strict=True) if value is not None)


def grade_answer(
    answer: PlaceAnswer, truth: KnownPlace, stage: GeoStage = STAGES[-1], weights: Mapping[str, float] = WEIGHTS
) -> Grade:
    """The reward of one stage. Raises DataError if the truth has nothing that the stage asks for."""
    asked = [part for part in stage.asks if part in truth.known]
    total = sum(weights[part] for part in asked)
    if total <= 0:
        raise DataError(
            f"the truth has {', '.join(truth.known) or 'nothing'}, but the stage asks for {', '.join(stage.asks)}; "
            f"add {asked[0] if asked else stage.asks[0]} to the row, or give it a weight"
        )
    parts = {part: _part(part, answer, truth, stage) for part in truth.known}
    score = math.fsum(weights[part] * parts[part] for part in asked) / total
    return Grade(score=min(score, 1.0), parts=parts, reason=_reason(answer, truth, parts, asked))


def distance_parts(answer: PlaceAnswer, truth: KnownPlace, tolerances_km: Sequence[float]) -> dict[str, float]:
    """Kilometres between the answer's coordinates and the true ones, and whether they are within each tolerance.

    An answer without coordinates is within no tolerance and has no distance; without true ones there are no parts.
    """
    if truth.at is None:
        return {}
    distance_km = math.inf if answer.at is None else great_circle_km(answer.at, truth.at)
    within = {f"within_{limit:g}_km": float(distance_km <= limit) for limit in tolerances_km}
    return within | ({"distance_km": distance_km} if math.isfinite(distance_km) else {})


def grade(prediction: str, truth: Mapping[str, object]) -> Grade:
    """Grade a response, by the last stage, against an object with any of country, region, city, lat and lon."""
    return grade_answer(parse_answer(prediction), place_of(truth))


def place_of(
    truth: Mapping[str, object], keys: Sequence[str] = ("country", "region", "city", "lat", "lon"), where: str = "truth"
) -> KnownPlace:
    """The true place of a row; `keys` name its columns, and empty cells are unknown. BadRowError for invalid cells."""
    country, region, city = (_name(truth.get(key), key, where) for key in keys[:3])
    code = None if country is None else country_code(country)
    if country is not None and code is None:
        fix = "write its English name or ISO code"
        raise BadRowError(f"{where}: {country!r} is not a known country", "place", fix)
    lat, lon = (_degrees(truth.get(key), key, limit, where) for key, limit in zip(keys[3:], (90, 180), strict=True))
    if (lat is None) != (lon is None):
        raise BadRowError(f"{where}: one of {keys[3]} and {keys[4]} is empty", "place", "give both or neither")
    at = None if lat is None or lon is None else LatLon(lat, lon)
    return KnownPlace(country=code, region=region, city=city, at=at)


def _name(cell: object, key: str, where: str) -> str | None:
    if cell is None or (isinstance(cell, float) and math.isnan(cell)):  # pandas writes NaN for an empty text
        return None
    if not isinstance(cell, str):
        raise BadRowError(f"{where}: {key} is of type {type(cell).__name__}, not a text", "place", "fix the row")
    return " ".join(cell.split()) or None


def _degrees(cell: object, key: str, limit: float, where: str) -> float | None:
    if cell is None or cell == "":
        return None
    try:
        degrees = float(str(cell))
    except ValueError as error:
        problem = f"{where}: {key} is {str(cell)[:40]!r}, not degrees"
        raise BadRowError(problem, "place", "write a number such as 48.86") from error
    if math.isnan(degrees):
        return None
    if abs(degrees) > limit:
        raise BadRowError(f"{where}: {key} is {degrees:g}, beyond {limit:g} degrees", "place", "fix the row")
    return degrees


def _part(part: str, answer: PlaceAnswer, truth: KnownPlace, stage: GeoStage) -> float:
    if part == "country":
        return _country(answer, truth, stage)
    if part == "region":
        given, true = answer.region, truth.region
        return float(given is not None and true is not None and same_region(given, true, truth.country))
    if part == "city":
        given, true = answer.city, truth.city
        return float(given is not None and true is not None and same_city(given, true, truth.country, truth.at))
    if answer.at is None or truth.at is None:
        return 0.0
    return math.exp(-great_circle_km(answer.at, truth.at) / stage.tolerance_km)


def _country(answer: PlaceAnswer, truth: KnownPlace, stage: GeoStage) -> float:
    code = country_code(answer.country) if answer.country is not None else None
    if code is None or truth.country is None or code == truth.country:
        return float(code is not None and code == truth.country)
    distance_km = None if "coordinates" in stage.asks else country_distance_km(code, truth.country)
    return 0.0 if distance_km is None else math.exp(-distance_km / stage.tolerance_km)


def _reason(answer: PlaceAnswer, truth: KnownPlace, parts: Mapping[str, float], asked: Sequence[str]) -> str:
    said = {"country": answer.country, "region": answer.region, "city": answer.city}
    notes = []
    for part in asked:
        if part == "coordinates":
            notes.append(_how_far(answer, truth))
        elif parts[part] == 1:
            notes.append(f"{part} right")
        else:
            true = country_name(truth.country) if part == "country" and truth.country else getattr(truth, part)
            notes.append(f"{part} missing" if said[part] is None else f"{part} {said[part]!r:.60} is not {true!r:.60}")
    return "; ".join(notes)


def _how_far(answer: PlaceAnswer, truth: KnownPlace) -> str:
    if answer.at is None or truth.at is None:
        return "coordinates missing"
    return f"{great_circle_km(answer.at, truth.at):.0f} km off"
