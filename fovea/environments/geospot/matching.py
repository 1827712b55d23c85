"""Whether two names mean one region or one city of a country. Aliases come from the gazetteer; nothing is fuzzy."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from fovea.environments.geospot.folding import spellings
from fovea.environments.geospot.gazetteer import City, LatLon, cities, great_circle_km, regions
from fovea.environments.geospot.region_names import KINDS_OF_REGION, REGION_ALIASES

MAX_KM_TO_THE_GAZETTEER = 75.0
"""The distance beyond which a city of the same name is a different one."""
_MAX_CHARS = 200


def same_region(given: str, truth: str, country: str | None) -> bool:
    """`"Bavaria"`, `"Bayern"`, `"State of Bavaria"` and `"BY"` are one region of DE."""
    return any(not _region_keys(form).isdisjoint(_region_answers(truth, country)) for form in _candidates(given))


def same_city(given: str, truth: str, country: str | None, at: LatLon | None = None) -> bool:
    """`"Munich"` and `"München"` are one city of DE; `at`, the true point, tells cities of one name apart."""
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
    """`"province of limburg"` and `"limburg province"` are `"limburg"`; a name that is only a kind stays."""
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
    names = (_all_keys(city) for city in near)
    return own.union(*(keys for keys in names if not keys.isdisjoint(own)))


def _is_near(city: City, at: LatLon) -> bool:
    # degrees first: most cities of a large country are far away
    return abs(city.at.lat - at.lat) < 1 and great_circle_km(city.at, at) < MAX_KM_TO_THE_GAZETTEER


def _all_keys(city: City) -> frozenset[str]:
    return frozenset().union(*(_city_keys(name) for name in (city.name, *city.other_names)))


@lru_cache(maxsize=100_000)
def _city_keys(name: str) -> frozenset[str]:
    return frozenset(
        key
        for spelling in spellings(name)
        for key in (spelling, spelling.removesuffix(" city"), _bare(spelling))
        if key
    )


def _bare(city: str) -> str:
    return city.removeprefix("city of ").removeprefix("ciudad de ").removeprefix("greater ").removeprefix("downtown ")
