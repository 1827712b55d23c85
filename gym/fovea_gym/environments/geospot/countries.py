"""Finds the country that a text names, as an ISO 3166-1 alpha-2 code. Names must match exactly after folding.

Names come from our own table, then ISO 3166 (pycountry) and CLDR in English (Babel), then CLDR in some seventy other
languages. A foreign name that two countries share is ignored. Kosovo, which ISO does not list, is XK.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import TypedDict

import pycountry
import yaml
from babel import Locale

from fovea_gym.environments.geospot.gazetteer import fold


class _CountryTables(TypedDict):
    aliases: dict[str, list[str]]
    extra_codes: dict[str, str]
    words_in_lower_case: list[str]
    long_forms: list[str]
    foreign_words: list[str]
    languages: list[str]


_TABLES: _CountryTables = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))

ALIASES = {code: tuple(names) for code, names in _TABLES["aliases"].items()}
"""Names by ISO 3166-1 alpha-2 code, which take precedence over every other source."""

EXTRA_CODES = _TABLES["extra_codes"]
"""Codes that are in use in addition to ISO's."""

WORDS_IN_LOWER_CASE = frozenset(_TABLES["words_in_lower_case"])
"""Codes that are also words: they are read as codes only in capitals."""

LONG_FORMS = tuple(_TABLES["long_forms"])
"""Phrases that may come before a country's short name."""

FOREIGN_WORDS = frozenset(_TABLES["foreign_words"])
"""Names of countries in other languages that are also English words."""

LANGUAGES = tuple(_TABLES["languages"])
"""CLDR locales, other than English, whose country names are known."""


_MAX_CHARS = 200
_CODE = re.compile(r"[A-Za-z]{2,3}")
_PARTS = re.compile(
    r"[,()\[\];/|?!]|\s[-–—]+\s|[–—]|:\s|(?<=\w\w\w)(?<!\b[Rr]ep)(?<!\b[Dd]em)(?<!\b[Ff]ed)\.\s"  # not `St. Maarten`
    r"|\b(?:or|and|aka|a\.k\.a\.|i\.e\.|formerly)\b"
)
_OR = re.compile(r"\bor\b")
_NAME_FIELDS = ("name", "common_name", "official_name")
_FLAG = re.compile("[\U0001f1e6-\U0001f1ff]{2}")
_LETTERS_OF_FLAGS = {0x1F1E6 + place: letter for place, letter in enumerate(string.ascii_uppercase)}
_HEDGES = re.compile(
    r"^(?:(?:most |very |quite )?"
    r"(?:likely|probably|possibly|perhaps|maybe|presumably|i think|it is|its|this is|somewhere in)\s+)+"
)
_SHARED_WITH_A_STATE = {"GE", "US"}
"""Both are found in `Georgia, USA`, which is the state; no other country shares its name with a region like this."""


@lru_cache(maxsize=20_000)
def country_code(text: str) -> str | None:
    """`"Côte d’Ivoire"`, `"CIV"`, `"Ivory Coast (West Africa)"` give `"CI"`; None for no country, or several."""
    if len(text) > _MAX_CHARS:
        return None
    whole = _lookup(_FLAG.sub("", text))
    if whole is not None:
        return whole
    if _OR.search(text):
        return _said_by_all(_OR.split(text))
    found = {code for part in _PARTS.split(text) if (code := _lookup(part))}
    found |= {code for flag in _FLAG.findall(text) if (code := _codes().get(flag.translate(_LETTERS_OF_FLAGS)))}
    if found == _SHARED_WITH_A_STATE and _lookup(text.rpartition(",")[2]) == "US":
        return "US"
    return found.pop() if len(found) == 1 else None


def _said_by_all(sides: Iterable[str]) -> str | None:
    """The country that all sides name: `Holland or the Netherlands`, but not `France or thereabouts`."""
    found = {country_code(side) for side in sides}
    return found.pop() if len(found) == 1 else None


@cache
def country_name(code: str) -> str:
    """The English name of a country that `country_code` knows."""
    name: str = Locale("en").territories[code]
    return name


@cache
def country_codes() -> frozenset[str]:
    """The codes of all countries: those of ISO 3166-1, and Kosovo."""
    return frozenset({country.alpha_2 for country in pycountry.countries} | {"XK"})


def _lookup(text: str) -> str | None:
    bare = text.strip(" \t\r\n.*_\"'`’‘“”")
    code = bare.replace(".", "")
    if _CODE.fullmatch(code) and code not in WORDS_IN_LOWER_CASE and code.upper() in _codes():
        return _codes()[code.upper()]
    name = _HEDGES.sub("", fold(bare))
    foreign: Mapping[str, str] = {} if bare.isascii() and name in FOREIGN_WORDS else _foreign_names()
    known = (_known_names().get(form) or foreign.get(form) for form in _forms(bare, name))
    return next((code for code in known if code is not None), None)


def _forms(bare: str, name: str) -> Iterator[str]:
    """The folded name, also with its parts in order (`Congo, Republic of the`) or without words like `republic`."""
    yield name
    own, comma, kind = bare.rpartition(",")
    if comma:
        yield fold(f"{kind} {own}")
    yield name.removesuffix(" the")
    yield from (
        name.removeprefix(form).strip().removeprefix("the ") for form in LONG_FORMS if name.startswith(f"{form} ")
    )


@cache
def _codes() -> Mapping[str, str]:
    codes = {code: country.alpha_2 for country in pycountry.countries for code in (country.alpha_2, country.alpha_3)}
    return codes | {"XK": "XK"} | EXTRA_CODES


@cache
def _known_names() -> Mapping[str, str]:
    """Codes by folded name."""
    own = ((name, code) for code, names in ALIASES.items() for name in names)
    return {**_unambiguous(_english_names()), **_unambiguous(own)}


@cache
def _foreign_names() -> Mapping[str, str]:
    """Codes by folded name in other languages; loading them, for the first foreign name, takes a second or two."""
    pairs = ((name, code) for language in LANGUAGES for name, code in _names_in(language) if _is_long(name))
    return _unambiguous(pairs)


def _is_long(name: str) -> bool:
    """True if a name is too long to be mistaken for a code or a word, as Áo would be."""
    return len(name) > 3 or not fold(name).isascii()


def _unambiguous(pairs: Iterable[tuple[str, str]]) -> Mapping[str, str]:
    codes: dict[str, set[str]] = {}
    for name, code in pairs:
        codes.setdefault(fold(name), set()).add(code)
    return {name: found.pop() for name, found in codes.items() if name and len(found) == 1}


def _english_names() -> Iterator[tuple[str, str]]:
    for country in pycountry.countries:
        fields = dict(country)  # for a missing attribute, pycountry warns and returns another one
        yield from ((fields[key], country.alpha_2) for key in _NAME_FIELDS if key in fields)
    yield from _names_in("en")


def _names_in(language: str) -> Iterator[tuple[str, str]]:
    for code, name in Locale.parse(language).territories.items():
        if code in country_codes():
            yield name, code
