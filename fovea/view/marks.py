"""Boxes and points in the text of an answer, in the forms that the Qwen-VL models were taught.

Qwen2-VL writes `(x1,y1),(x2,y2)` (arXiv 2409.12191, section 2.2); Qwen2.5-VL and Qwen3-VL write JSON with
`"bbox_2d": [x1, y1, x2, y2]` and `"point_2d": [x, y]`. Special tokens around them are no part of the text.
"""

from __future__ import annotations

import re

from fovea.report.records import RecordedImage
from fovea.types import Mark

MAX_MARKS = 200
"""Of one text: more cannot be told apart on an image."""
_NUMBER = r"\s*(-?\d+(?:\.\d+)?)\s*"
_PAIRS = rf"\({_NUMBER},{_NUMBER}\)\s*,\s*\({_NUMBER},{_NUMBER}\)"
_BOX = rf'"(?:bbox_2d|bbox)"\s*:\s*\[{_NUMBER},{_NUMBER},{_NUMBER},{_NUMBER}\]'
_POINT = rf'"(?:point_2d|point)"\s*:\s*\[{_NUMBER},{_NUMBER}\]'
_MARK = re.compile("|".join((_PAIRS, _BOX, _POINT)))
_LABEL = re.compile(r'"label"\s*:\s*"([^"\\\n]{1,80})"')


def marks_in(text: str, image: RecordedImage | None, place: int) -> tuple[Mark, ...]:
    """The marks of an answer on the last image before it, which is the `place`-th that the model has read.

    None where there is no image, or its frame of coordinates is not known.
    """
    if image is None or image.frame is None:
        return ()
    found = list(_MARK.finditer(text))[:MAX_MARKS]
    return tuple(_mark(match, text, image.frame, place) for match in found)


def _mark(match: re.Match[str], text: str, frame: tuple[int, int], place: int) -> Mark:
    numbers = [float(number) for number in match.groups() if number is not None]
    width, height = frame
    return Mark(
        image=place,
        xy=tuple(number / (height if axis % 2 else width) for axis, number in enumerate(numbers)),
        label=_label(text, match),
    )


def _label(text: str, match: re.Match[str]) -> str:
    """The label of the JSON object that holds the mark, if it has one."""
    start, end = text.rfind("{", 0, match.start()), text.find("}", match.end())
    if start < 0 or end < 0 or "}" in text[start : match.start()]:
        return ""
    label = _LABEL.search(text, start, end)
    return label[1] if label else ""
