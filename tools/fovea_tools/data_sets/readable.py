"""Readable geometry: small drawn diagrams whose numbers a tiny vision tower can read, in Geometry3K's layout.

The text of the question is the same for all rows of a kind, so the numbers are only in the picture. A label is at a
fixed place, in the centre of a visual token (16 px: 2 x 2 patches of 8 px); lines are jittered by up to 2 px and have a
random colour. No two rows of any files have the same drawing. About a fifth of the problems of each kind (numbers, or
pairs of numbers) are only in the test file; the kind of their rows ends with `UNSEEN`. No problem needs a carry, so
that an unseen one can be answered digit by digit.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pyarrow as pa
from PIL import Image, ImageDraw, ImageFont

from fovea_gym.environments.dataset_prompts import IMAGE_MARK
from fovea_gym.rows.writing import IMAGE_TYPE, image_cell
from fovea_tools.data_sets.scenes import write_sampled

_Point: TypeAlias = tuple[int, int]
_Path: TypeAlias = tuple[_Point, ...]
UNSEEN = " unseen"
_SIDE_PX = 48
_LOW, _MIDDLE, _HIGH = 8, 24, 40  # the centres of 3 x 3 visual tokens
_FONT_PX = 13  # two digits fill a visual token
_SHAKE_PX = 2
_UNSEEN_SHARE = 0.5
_SCHEMA = pa.schema(
    [("problem", pa.string()), ("images", pa.list_(IMAGE_TYPE)), ("answer", pa.string()), ("kind", pa.string())]
)


class _Drawing:
    """A white square with lines in one colour and black labels."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._image = Image.new("RGB", (_SIDE_PX, _SIDE_PX), "white")
        self._pen = ImageDraw.Draw(self._image)
        red, green, blue = (int(value) for value in rng.integers(110, 211, 3))
        self._colour = (red, green, blue)

    def path(self, points: _Path) -> None:
        """Draw lines from point to point, each point jittered; the path is closed if it ends where it begins."""
        moved = {(x, y): (x + self._shake(), y + self._shake()) for x, y in dict.fromkeys(points)}
        self._pen.line([moved[point] for point in points], fill=self._colour)

    def label(self, text: object, x: int, y: int) -> None:
        self._pen.text((x, y), str(text), fill="black", font=ImageFont.load_default(size=_FONT_PX), anchor="mm")

    def png(self) -> bytes:
        buffer = io.BytesIO()
        self._image.save(buffer, format="PNG")
        return buffer.getvalue()

    def _shake(self) -> int:
        return int(self._rng.integers(-_SHAKE_PX, _SHAKE_PX + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    question: str
    problems: tuple[tuple[int, ...], ...]
    """The numbers of each problem."""
    answer: Callable[..., int]
    paths: tuple[_Path, ...]
    labels: tuple[_Point, ...]
    """Positions of the numbers, and of the x."""


_TRIANGLE: _Path = ((2, 46), (46, 46), (24, 2), (2, 46))
_NUMBERS = tuple((10 * tens + ones,) for tens, ones in product(range(1, 8), range(1, 10)))
_PAIRS = tuple(
    (10 * left + first, 10 * right + second) for left, first, right, second in product(range(1, 5), repeat=4)
)
KINDS = {
    "isosceles": _Kind(
        question="Two sides of the triangle are equal. Find its base angle x.",
        problems=_NUMBERS,
        answer=lambda angle: angle,
        paths=(_TRIANGLE,),
        labels=((_LOW, _HIGH), (_HIGH, _HIGH)),
    ),
    "complement": _Kind(
        question="Find the other acute angle x of the right triangle.",
        problems=_NUMBERS,
        answer=lambda angle: 90 - angle,
        paths=(((2, 46), (46, 46), (2, 2), (2, 46)),),
        labels=((_HIGH, _HIGH), (_LOW, _MIDDLE)),
    ),
    "supplement": _Kind(
        question="Two angles on a straight line. Find x.",
        problems=_NUMBERS,
        answer=lambda angle: 180 - angle,
        paths=(((2, 46), (46, 46)), ((24, 46), (24, 2))),
        labels=((_LOW, _HIGH), (_HIGH, _HIGH)),
    ),
    "angle": _Kind(
        question="Find the third angle x of the triangle.",
        problems=_PAIRS,
        answer=lambda left, right: 180 - left - right,
        paths=(_TRIANGLE,),
        labels=((_LOW, _HIGH), (_HIGH, _HIGH), (_MIDDLE, _MIDDLE)),
    ),
    "segment": _Kind(
        question="A segment is cut in two parts. Find its length x.",
        problems=_PAIRS,
        answer=lambda left, right: left + right,
        paths=(((3, 24), (45, 24)), *(((x, 20), (x, 28)) for x in (3, 24, 45))),
        labels=((_LOW, _LOW), (_HIGH, _LOW), (_MIDDLE, _HIGH)),
    ),
}


def is_unseen(numbers: tuple[int, ...]) -> bool:
    """True for a problem that is only in the test file; its digits, and pairs of them, are in other problems too."""
    digits = "".join(map(str, numbers))
    return sum(place * int(digit) for place, digit in enumerate(digits, 1)) % 5 == 0


def write_readable(folder: Path, *, num_rows: int, seed: int) -> Iterator[Path]:
    """Write train, validation (a twentieth) and test (a tenth) files, equal for equal arguments; yield each."""
    return write_sampled(folder, _SCHEMA, _draw, num_rows=num_rows, seed=seed)


def _draw(split: str, index: int, rng: np.random.Generator) -> tuple[bytes, dict[str, object]]:
    """The bytes of a row's picture, and the row; the kinds take turns."""
    name = tuple(KINDS)[index % len(KINDS)]
    kind, asks_unseen = KINDS[name], split == "test" and rng.random() < _UNSEEN_SHARE
    asked = [numbers for numbers in kind.problems if is_unseen(numbers) == asks_unseen]
    numbers = asked[rng.integers(len(asked))]
    drawing = _Drawing(rng)
    for path in kind.paths:
        drawing.path(path)
    for text, place in zip((*numbers, "x"), kind.labels, strict=True):
        drawing.label(text, *place)
    png = drawing.png()
    return png, {
        "problem": IMAGE_MARK + kind.question,
        "images": [image_cell(png)],
        "answer": str(kind.answer(*numbers)),
        "kind": name + (UNSEEN if asks_unseen else ""),
    }
