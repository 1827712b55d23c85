"""Latitudes and longitudes in the notations that people and models use.

`-33.87`, `−33,87`, `33.87° S`, `33.87 (S)`, `S 33.87`, `33°52′10″S`, `33 52 10 S`, `33.87 degrees south`, `33.87° Sur`.
The letter of a hemisphere decides the sign; a value that is out of range, or of the other axis, is not a coordinate.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from fovea_gym.environments.geospot.gazetteer import LatLon

Axis: TypeAlias = Literal["lat", "lon"]

_MAX_CHARS = 500
_LIMITS: Mapping[Axis, float] = {"lat": 90.0, "lon": 180.0}
_SIGNS = str.maketrans({"−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "‒": "-", "﹣": "-", "₋": "-", "⁻": "-"})
_MARKS = str.maketrans(
    {"º": "°", "˚": "°", "∘": "°", "’": "'", "′": "'", "`": "'", "´": "'", "‘": "'", "ʹ": "'", "″": '"'}
)
_MORE_MARKS = str.maketrans({"”": '"', "“": '"', "ʺ": '"', "˝": '"', "٫": ".", "·": ".", "，": ","})
_DECIMALS = 20
_NUMBER = rf"\d{{1,3}}(?:[.,]\d{{1,{_DECIMALS}}})?"
_SIXTIETHS = rf"\d{{1,2}}(?:[.,]\d{{1,{_DECIMALS}}})?"
_HEMISPHERES: Mapping[str, tuple[Axis, int]] = {
    **dict.fromkeys(("n", "north", "norte", "nord"), ("lat", 1)),
    **dict.fromkeys(("s", "south", "sur", "sul", "sud", "süd"), ("lat", -1)),
    **dict.fromkeys(("e", "east", "este", "leste", "est", "ost"), ("lon", 1)),
    **dict.fromkeys(("w", "west", "oeste", "ouest"), ("lon", -1)),
}
"""The letter O is left out: it means west in Spanish and French, east in German."""
_HEMISPHERE = rf"(?:{'|'.join(sorted(_HEMISPHERES, key=len, reverse=True))})(?![^\W\d_])"
_COORDINATE = re.compile(
    rf"""(?<![\w.])(?<!\d-)(?:(?P<before>{_HEMISPHERE})[\s:]{{0,3}})?
    (?P<sign>[-+]|minus\b|negative\b)?\s?(?P<degrees>{_NUMBER})(?!\.?\d)
    (?:
      \s{{0,3}}(?:°|degrees?\b|deg\b|d(?=\s{{0,3}}\d))
      (?:\s{{0,3}}(?P<minutes>{_SIXTIETHS})\s{{0,3}}(?:'(?!')|minutes?\b|min\b|m(?![^\W\d_]))
        (?:\s{{0,3}}(?P<seconds>{_SIXTIETHS})\s{{0,3}}(?:"|''|seconds?\b|sec\b|s(?=\s{{0,3}}[nsew])))?
      )?
    | [\s:](?P<bare_minutes>\d{{1,2}})[\s:](?P<bare_seconds>{_SIXTIETHS})(?=\s?[nsew](?![^\W\d_]))
    )?
    (?(before)|(?:\s{{0,3}}(?:(?P<after>{_HEMISPHERE})|\((?P<in_brackets>{_HEMISPHERE})\)))?)""",
    re.VERBOSE | re.IGNORECASE,
)


class _Coordinate(NamedTuple):
    degrees: float
    axis: Axis | None
    """The axis that a letter names; None without a letter."""


def parse_degrees(text: str, axis: Axis) -> float | None:
    """The first coordinate in a text; None if it cannot be one of this axis."""
    found = next(_coordinates(text), None)
    if found is None or found.axis not in (None, axis) or abs(found.degrees) > _LIMITS[axis]:
        return None
    return found.degrees


def parse_point(text: str) -> LatLon | None:
    """Two coordinates, latitude first unless letters say otherwise; None for any other number of them."""
    found = list(_coordinates(text))
    if len(found) != 2:
        return None
    first, second = found
    if first.axis == "lon" or second.axis == "lat":
        first, second = second, first
    if first.axis == "lon" or second.axis == "lat" or abs(first.degrees) > 90 or abs(second.degrees) > 180:
        return None
    return LatLon(first.degrees, second.degrees)


def degrees_text(degrees: float) -> str:
    """Degrees with as many decimals as are parsed, and without an exponent, whose `e` would be read as east."""
    return np.format_float_positional(degrees, precision=_DECIMALS, trim="-")


def plain(text: str) -> str:
    """The text with all signs and marks of coordinates replaced by plain ones."""
    marked = text.translate(_MARKS).translate(_MORE_MARKS)  # before NFKC, which turns º into the letter o
    return unicodedata.normalize("NFKC", marked).translate(_SIGNS)


def _coordinates(text: str) -> Iterator[_Coordinate]:
    if len(text) > _MAX_CHARS:
        return
    for match in _COORDINATE.finditer(plain(text)):
        found = _read(match)
        if found is not None:
            yield found


def _read(match: re.Match[str]) -> _Coordinate | None:
    degrees = _number(match["degrees"])
    minutes = _number(match["minutes"] or match["bare_minutes"] or "0")
    seconds = _number(match["seconds"] or match["bare_seconds"] or "0")
    if minutes >= 60 or seconds >= 60:
        return None
    degrees += minutes / 60 + seconds / 3600
    letter = (match["after"] or match["in_brackets"] or match["before"] or "").lower()
    axis, side = _HEMISPHERES.get(letter, (None, 1))
    is_negative = side < 0 or match["sign"] not in (None, "+")
    return _Coordinate(-degrees if is_negative else degrees, axis)


def _number(text: str) -> float:
    return float(text.replace(",", "."))
