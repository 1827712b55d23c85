"""The reward of an answer: 0.3 country + 0.2 region + 0.2 city + 0.3 exp(-d / tolerance), in five stages.

d is the great-circle distance in km. A stage asks for some of the four parts; their weights are scaled to sum to 1. A
part that the answer lacks scores 0 and stays in that sum; a part that the *truth* lacks cannot be asked for.

The tolerance tightens from stage to stage. While coordinates are not asked for, it is what a wrong country may be off:
a guess whose middle is d from that of the true country scores exp(-d / tolerance) for its country. With coordinates,
the distance is theirs, and a wrong country scores 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fovea.environments.geospot.countries import country_code, country_name
from fovea.environments.geospot.gazetteer import LatLon, country_distance_km, great_circle_km
from fovea.environments.geospot.matching import same_city, same_region
from fovea.environments.geospot.parsing import Answer, parse_answer
from fovea.environments.graders.base import Grade
from fovea.errors import DataError

PARTS = ("country", "region", "city", "coordinates")
WEIGHTS: Mapping[str, float] = {"country": 0.3, "region": 0.2, "city": 0.2, "coordinates": 0.3}


@dataclass(frozen=True, slots=True, kw_only=True)
class GeoStage:
    """What is asked for, and how far off still earns something (1/e of the full score at the tolerance)."""

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
class Place:
    """Where a picture was taken, as far as that is known."""

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
    answer: Answer, truth: Place, stage: GeoStage = STAGES[-1], weights: Mapping[str, float] = WEIGHTS
) -> Grade:
    """The reward of one stage. Raises DataError where the truth has nothing that the stage asks for."""
    asked = [part for part in stage.asks if part in truth.known]
    total = sum(weights[part] for part in asked)
    if total <= 0:
        raise DataError(
            f"the truth knows {', '.join(truth.known) or 'nothing'}, but the stage asks for {', '.join(stage.asks)}; "
            f"add {asked[0] if asked else stage.asks[0]} to the row, or give it a weight"
        )
    parts = {part: _part(part, answer, truth, stage) for part in truth.known}
    score = math.fsum(weights[part] * parts[part] for part in asked) / total
    return Grade(score=min(score, 1.0), parts=parts, reason=_reason(answer, truth, parts, asked))


def distance_parts(answer: Answer, truth: Place, tolerances_km: Sequence[float]) -> dict[str, float]:
    """Kilometres between the answer's coordinates and the true ones, and whether they are within each tolerance.

    An answer without coordinates is within none and has no distance; a truth without any has no such parts.
    """
    if truth.at is None:
        return {}
    distance_km = math.inf if answer.at is None else great_circle_km(answer.at, truth.at)
    within = {f"within_{limit:g}_km": float(distance_km <= limit) for limit in tolerances_km}
    return within | ({"distance_km": distance_km} if math.isfinite(distance_km) else {})


def grade(prediction: str, truth: Mapping[str, object]) -> Grade:
    """A whole response against an object with any of country, region, city, lat, lon, at the full stage."""
    return grade_answer(parse_answer(prediction), place_of(truth))


def place_of(
    truth: Mapping[str, object], keys: Sequence[str] = ("country", "region", "city", "lat", "lon"), where: str = "truth"
) -> Place:
    """The true place of a row; `keys` name its columns, empty cells are unknown. DataError for what is no place."""
    country, region, city = (_name(truth.get(key), key, where) for key in keys[:3])
    code = None if country is None else country_code(country)
    if country is not None and code is None:
        raise DataError(f"{where}: {country!r} is no country we know; write its English name or ISO code")
    lat, lon = (_degrees(truth.get(key), key, limit, where) for key, limit in zip(keys[3:], (90, 180), strict=True))
    if (lat is None) != (lon is None):
        raise DataError(f"{where}: one of {keys[3]} and {keys[4]} is empty; give both or neither")
    at = None if lat is None or lon is None else LatLon(lat, lon)
    return Place(country=code, region=region, city=city, at=at)


def _name(cell: object, key: str, where: str) -> str | None:
    if cell is None or (isinstance(cell, float) and math.isnan(cell)):  # pandas writes NaN for an empty text
        return None
    if not isinstance(cell, str):
        raise DataError(f"{where}: {key} is of type {type(cell).__name__}, not a text; fix the row")
    return " ".join(cell.split()) or None


def _degrees(cell: object, key: str, limit: float, where: str) -> float | None:
    if cell is None or cell == "":
        return None
    try:
        degrees = float(str(cell))
    except ValueError as error:
        raise DataError(f"{where}: {key} is {str(cell)[:40]!r}, not degrees; write a number such as 48.86") from error
    if math.isnan(degrees):
        return None
    if abs(degrees) > limit:
        raise DataError(f"{where}: {key} is {degrees:g}, beyond {limit:g} degrees; fix the row")
    return degrees


def _part(part: str, answer: Answer, truth: Place, stage: GeoStage) -> float:
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


def _country(answer: Answer, truth: Place, stage: GeoStage) -> float:
    code = country_code(answer.country) if answer.country is not None else None
    if code is None or truth.country is None or code == truth.country:
        return float(code is not None and code == truth.country)
    distance_km = None if "coordinates" in stage.asks else country_distance_km(code, truth.country)
    return 0.0 if distance_km is None else math.exp(-distance_km / stage.tolerance_km)


def _reason(answer: Answer, truth: Place, parts: Mapping[str, float], asked: Sequence[str]) -> str:
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


def _how_far(answer: Answer, truth: Place) -> str:
    if answer.at is None or truth.at is None:
        return "coordinates missing"
    return f"{great_circle_km(answer.at, truth.at):.0f} km off"
