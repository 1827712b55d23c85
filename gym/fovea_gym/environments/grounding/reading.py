r"""Boxes and points in a text: JSON, tags, brackets and pairs, as the model families write them.

    {"bbox_2d": [12, 40, 30, 60]}   also bbox, box_2d, box; in a list, in code fences
    {"point_2d": [12, 40]}          also point
    <box>(12,40),(30,60)</box>      also with brackets, or numbers only
    <point>12 40</point>
    [12, 40, 30, 60]   (12, 40),(30, 60)   [12, 40]   (12, 40)   also with full-width brackets and commas

Patterns have bounded repeats, so that reading takes linear time, and nothing is evaluated.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

from fovea_gym.graders.math_answer import last_boxed, last_tagged

Numbers: TypeAlias = tuple[float, ...]
_NUMBER = r"\s{0,9}(-?\d{1,9}(?:\.\d{1,17})?)\s{0,9}"
_TWO = rf"{_NUMBER},{_NUMBER}"
_FOUR = rf"{_TWO},{_TWO}"
_PAIRS = rf"\({_TWO}\)\s{{0,9}},\s{{0,9}}\({_TWO}\)"
_KEY_BOX = rf"[\"'](?:bbox_2d|bbox|box_2d|box)[\"']\s{{0,9}}:\s{{0,9}}\[{_FOUR}\]"
_KEY_POINT = rf"[\"'](?:point_2d|point)[\"']\s{{0,9}}:\s{{0,9}}\[{_TWO}\]"
MARK = re.compile("|".join((_PAIRS, _KEY_BOX, _KEY_POINT)))
"""A box or point that can be recognised anywhere in a text: pairs of coordinates, or a key of JSON."""
_GAP = r"[\s,]{1,9}"
_PLAIN = r"(-?\d{1,9}(?:\.\d{1,17})?)"
_TAG_BOX = rf"<box>\s{{0,9}}{_PLAIN}{_GAP}{_PLAIN}{_GAP}{_PLAIN}{_GAP}{_PLAIN}\s{{0,9}}</box>"
_TAG_POINT = rf"<point>\s{{0,9}}{_PLAIN}{_GAP}{_PLAIN}\s{{0,9}}</point>"
_BARE_BOX = rf"\[{_FOUR}\]|\({_FOUR}\)|{_TAG_BOX}"
_BARE_POINT = rf"\[{_TWO}\]|\({_TWO}\)|{_TAG_POINT}"
_BOXES = re.compile(rf"{_PAIRS}|{_BARE_BOX}|{_BARE_POINT}")
_POINTS = re.compile(rf"{_BARE_BOX}|{_BARE_POINT}")
"""Without `_PAIRS`, since a pair of coordinates in brackets is two points here."""
_NUMBERS_ONLY = re.compile(rf"{_FOUR}|{_TWO}")
_HALF_WIDTH = {full: full - 0xFEE0 for full in range(0xFF01, 0xFF5F)} | str.maketrans(
    "\N{IDEOGRAPHIC COMMA}\N{LEFT BLACK LENTICULAR BRACKET}\N{RIGHT BLACK LENTICULAR BRACKET}\N{IDEOGRAPHIC SPACE}",
    ",[] ",
)
"""Maps the full-width digits, brackets and commas of Chinese and Japanese texts to ASCII."""
_FENCE = "```"
_NAME = re.compile(r"[\w-]{0,20}\s")
_NONE = re.compile(r"\[\s{0,9}\]|none\.?", re.IGNORECASE)


class Answer(NamedTuple):
    """The places in the final answer of a response."""

    places: tuple[Numbers, ...]
    """Two numbers for a point and four for a box, in the order of the text."""
    region: str
    """The text of the final answer."""
    is_tagged: bool
    """True if the answer is in `<answer>` tags."""

    @property
    def says_none(self) -> bool:
        """True if the answer is an empty list or the word none."""
        return not self.places and _NONE.fullmatch(self.region.translate(_HALF_WIDTH)) is not None


def read_answer(text: str, *, points: bool, most: int) -> Answer:
    r"""The places in the final answer of a response, at most `most` + 1 of them.

    The final answer is the text after `</think>`, narrowed to the last `<answer>...</answer>`, the last `\boxed{}` in
    it and the last code fence in that, as far as these exist. With `points`, `(1,2),(3,4)` are two points, otherwise
    a box.
    """
    region = text.rpartition("</think>")[2]
    tagged = last_tagged(region)
    region = region if tagged is None else tagged
    boxed = last_boxed(region)
    region = _last_fence(region if boxed is None else boxed).strip()
    return Answer(tuple(_places(region, points=points, most=most)), region, tagged is not None)


def _places(region: str, *, points: bool, most: int) -> Iterator[Numbers]:
    region = region.translate(_HALF_WIDTH)
    if bare := _NUMBERS_ONLY.fullmatch(region):
        yield numbers_of(bare)
        return
    for count, match in enumerate((_POINTS if points else _BOXES).finditer(region)):
        yield numbers_of(match)
        if count == most:
            return


def numbers_of(match: re.Match[str]) -> Numbers:
    """The numbers of a match of these patterns: two or four."""
    return tuple(float(number) for number in match.groups() if number is not None)


def _last_fence(text: str) -> str:
    """The content of the last closed code fence without its language, else the text."""
    before, closing, _ = text.rpartition(_FENCE)
    _, opening, inside = before.rpartition(_FENCE)
    if not closing or not opening:
        return text
    name = _NAME.match(inside)
    return inside[name.end() :] if name else inside
