"""The place in a model's response, written as JSON, labelled lines, or "city, region, country, lat, lon".

The last value given for a field counts, so that thinking aloud neither helps nor hurts. Parsing takes linear time, and
only the end of a long response is read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from fovea_gym.environments.geospot.coordinates import degrees_text, parse_degrees, parse_point, plain
from fovea_gym.environments.geospot.countries import country_code
from fovea_gym.environments.geospot.gazetteer import LatLon

_MAX_CHARS = 20_000
_MAX_JSON_TRIES = 30
_MAX_LINES = 40
_MAX_LINE_CHARS = 300

_LABELS = {
    "city": "city city_name town village municipality locality place city/town town/city nearest_city",
    "region": "region state province state/province province/state region/state state/region state_or_province county "
    "prefecture department territory oblast administrative_region admin1 region/province region_name state_name "
    "region/state/province state/province/region",
    "country": "country nation country_name country_code country/territory",
    "lat": "latitude lat",
    "lon": "longitude lon lng long",
    "point": "coordinates coordinate coords gps gps_coordinates latlon lat_lon lat,lon lat/lon lat/long lat/lng "
    "lat_long latitude_and_longitude latitude,longitude latitude/longitude approximate_coordinates "
    "estimated_coordinates",
    "line": "location answer final_answer place_name address guess prediction final_guess my_guess",
}
_FIELD_OF = {label.replace("_", " "): field for field, labels in _LABELS.items() for label in labels.split()}
_LABEL = re.compile(
    r"(?<![^\W_])(?P<label>"
    + "|".join(re.escape(label).replace(r"\ ", r"[\s_]?") for label in sorted(_FIELD_OF, key=len, reverse=True))
    + r")(?:\s{0,3}\([^()\n]{1,40}\))?[*_`\"'\s]{0,8}(?:[:：=]|\|(?!\|))[*_`]{0,3}",
    re.IGNORECASE,
)
_THINKING = re.compile(r"</think(?:ing)?>", re.IGNORECASE)
_ANSWER_TAG = re.compile(r"<answer>(.*?)(?:</answer>|\Z)", re.IGNORECASE | re.DOTALL)
_MARKUP = " \t\r\n*_`\"'“”‘’«»|<>#[]{}"
_EDGES = _MARKUP + ".,;:，；。"
_NOTHING = {"", "-", "?", "n/a", "na", "none", "null"}
_NOTHING |= {"unknown", "not sure", "unclear", "undetermined", "unspecified"}
_NOT_A_NUMBER = {"nan", "NaN", "NAN"}
"""Spellings of a missing value in programs; Nan is not among them, since it is a city in Thailand."""
_SIGN_APART = re.compile(r"^([ \t*_`\"']{0,8})[-−–—] (?=\d)")
# `latitude 33.87° S`, without a colon; `long` is left out, since it is a word
_BARE_DEGREES = re.compile(
    r"(?<![^\W_])(?P<label>latitude|longitude|lat|lon|lng)\.?\s{1,3}(?=[-+−–]?\s?\d|[NSEW]\s?\d|minus\s)", re.IGNORECASE
)
_BULLET = re.compile(r"^\s*(?:[-*•·–—>#+]\s*|\d{1,2}[.)]\s+)+")
_BOX = re.compile(r"\\boxed\s*\{(?:\\text\s*\{)?([^{}]*)\}")
_COORDINATE_START = re.compile(r"[-+]?\d|\b[NSEW]\s?\d")
_STATE_CODES = """
    AL AK AZ AR CA CO CT DE FL GA HI ID IL IN IA KS KY LA ME MD MA MI MN MS MO MT NE NV NH NJ NM NY NC ND
    OH OK OR PA RI SC SD TN TX UT VT VA WA WV WI WY
"""
_US_STATES = frozenset(_STATE_CODES.split())


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceAnswer:
    """The fields of an answer as they were written; None for fields that are missing or cannot be read."""

    country: str | None = None
    region: str | None = None
    city: str | None = None
    at: LatLon | None = None


@dataclass(slots=True)
class _Draft:
    """An answer under construction; `lat` and `lon` are text until both are known."""

    fields: dict[str, str]

    def take(self, field: str, value: str) -> None:
        if field in ("lat", "lon"):
            self.fields.pop("point", None)
        elif field == "point":
            self.fields.pop("lat", None)
            self.fields.pop("lon", None)
        self.fields[field] = value


def parse_answer(text: str) -> PlaceAnswer:
    """The place that a response names; never raises."""
    text = _THINKING.split(text)[-1][-_MAX_CHARS:]
    tagged = _ANSWER_TAG.findall(text)
    text = tagged[-1] if tagged else text
    draft = _Draft({})
    for field, value in (*_labelled(text), *_from_json(text)):
        draft.take(field, value)
    boxed = _BOX.findall(text)
    line = draft.fields.pop("line", None) or (boxed[-1] if boxed else None)
    answer = _finish(draft)
    if line is not None:
        answer = _filled(answer, _from_line(line) or PlaceAnswer())
    elif not draft.fields:
        answer = _from_lines(text) or answer
    return _filled(answer, _bare_degrees(text)) if draft.fields.keys().isdisjoint(("lat", "lon", "point")) else answer


def _bare_degrees(text: str) -> PlaceAnswer:
    """Coordinates after labels without a colon, as in `Latitude 33.87° S, longitude 151.21° E`."""
    labels = list(_BARE_DEGREES.finditer(text))
    ends = [*(label.start() for label in labels), len(text)][1:]
    return _finish(
        _Draft({_FIELD_OF[m["label"].lower()]: text[m.end() : end][:60] for m, end in zip(labels, ends, strict=True)})
    )


def _finish(draft: _Draft) -> PlaceAnswer:
    fields = draft.fields
    at = parse_point(fields["point"]) if "point" in fields else None
    if "lat" in fields and "lon" in fields:
        lat, lon = parse_degrees(fields["lat"], "lat"), parse_degrees(fields["lon"], "lon")
        at = None if lat is None or lon is None else LatLon(lat, lon)
    return PlaceAnswer(country=fields.get("country"), region=fields.get("region"), city=fields.get("city"), at=at)


def _filled(answer: PlaceAnswer, other: PlaceAnswer) -> PlaceAnswer:
    """An answer whose missing fields are filled in from another answer."""
    return replace(
        answer,
        country=answer.country or other.country,
        region=answer.region or other.region,
        city=answer.city or other.city,
        at=answer.at or other.at,
    )


def _labelled(text: str) -> Iterator[tuple[str, str]]:
    """The fields of labels such as `City: Paris`, with or without markup; a value ends with its line or at a label."""
    labels = list(_LABEL.finditer(text))
    ends = [*(label.start() for label in labels), len(text)][1:]
    for label, end in zip(labels, ends, strict=True):
        field = _FIELD_OF[re.sub(r"[\s_]+", " ", label["label"].lower())]
        written = _SIGN_APART.sub(r"\1-", text[label.end() : end][:_MAX_LINE_CHARS])  # a sign, not a bullet
        value = _clean(_first_line(written))
        if value is not None:
            yield field, value


def _first_line(text: str) -> str:
    """The first line of a value; its label may be on a line above."""
    return next((line for line in text.splitlines()[:3] if line.strip(_EDGES)), "")


def _clean(value: str) -> str | None:
    """A value without bullets, bold and quotes; None for `unknown` and the like."""
    bare = _BULLET.sub("", value) if not _COORDINATE_START.match(plain(value).strip(_MARKUP)) else value
    bare = bare.replace("**", "").strip(_EDGES)
    return None if bare.casefold() in _NOTHING or bare in _NOT_A_NUMBER else bare


def _from_json(text: str) -> Iterator[tuple[str, str]]:
    """The fields of the last JSON object that names a place: the outermost, not an alternative listed inside it."""
    decoder = json.JSONDecoder()
    starts = [match.start() for match in re.finditer(r"\{", text)]
    best: list[tuple[str, str]] = []
    best_end = 0
    for start in reversed(starts[-_MAX_JSON_TRIES:]):
        try:
            found, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            continue
        pairs = list(_json_fields(found))
        if end > best_end and any(field in ("country", "region", "city") for field, _ in pairs):
            best, best_end = pairs, end
    yield from best


def _json_fields(found: object, depth: int = 0) -> Iterator[tuple[str, str]]:
    if not isinstance(found, Mapping) or depth > 2:
        return
    for key, value in found.items():
        field = _FIELD_OF.get(re.sub(r"[\s_]+", " ", str(key).strip().lower()))
        if isinstance(value, Mapping):
            yield from _json_fields(value, depth + 1)
        elif field is not None:
            text = ", ".join(map(_text, value[:3])) if isinstance(value, list) else _text(value)
            cleaned = _clean(text) if value is not None else None
            if cleaned is not None:
                yield field, cleaned


def _text(value: object) -> str:
    return degrees_text(value) if isinstance(value, float) else str(value)


def _from_lines(text: str) -> PlaceAnswer | None:
    """The place in the last line that ends with a country, or with a country and coordinates."""
    lines = [line for line in text.splitlines() if line.strip()][-_MAX_LINES:]
    found = (_from_line(line) for line in reversed(lines))
    return next((answer for answer in found if answer is not None), None)


def _from_line(line: str) -> PlaceAnswer | None:
    """The place in `Paris, Île-de-France, France, 48.86, 2.35`; fewer parts are the country, or city and country."""
    line = _BARE_DEGREES.sub("", _BULLET.sub("", plain(line)).strip(_EDGES + "()"))
    if len(line) > _MAX_LINE_CHARS:
        return None
    number = _COORDINATE_START.search(line)
    names = line[: number.start()] if number else line
    at = parse_point(line[number.start() :]) if number else None
    parts = [part for part in (_clean(each) for each in names.strip(_EDGES + "()-").split(",")) if part]
    if not parts or (len(parts) == 2 and parts[-1] in _US_STATES) or country_code(parts[-1]) is None:
        return None
    return PlaceAnswer(
        country=parts[-1],
        region=parts[-2] if len(parts) > 2 else None,
        city=parts[0] if len(parts) > 1 else None,
        at=at,
    )
