"""Coordinates on a picture: the frame in which a model gives them, and true places written in this frame.

A frame is a width and a height: 1000 and 1000 for thousandths, or the size of the resized picture for its pixels.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Protocol, TypeAlias

from fovea_gym.environments.grounding.reading import Numbers
from fovea_gym.rows.images import Size
from fovea_gym.settings.grounding import Coordinates, Units
from fovea_gym.types import ImageRef

Frame: TypeAlias = tuple[float, float]
_THOUSANDTHS, _UNIT = (1000.0, 1000.0), (1.0, 1.0)
_UNIT_DECIMALS = 4


class Pictures(Protocol):
    """Sizes of pictures, as they are stored and as the run's model sees them."""

    def stored(self, ref: ImageRef) -> Size:
        """Width and height in pixels of the file, after the rotation that its EXIF data ask for."""
        ...

    def seen(self, ref: ImageRef) -> Size:
        """Width and height in pixels after the model's image processor."""
        ...

    def frame(self, ref: ImageRef) -> Size:
        """Width and height in which the model's family gives coordinates."""
        ...


def frame_of(coordinates: Coordinates | Units, ref: ImageRef, pictures: Pictures) -> Frame:
    """The frame that belongs to these coordinates on a picture."""
    if coordinates in ("thousandths", "unit"):
        return _UNIT if coordinates == "unit" else _THOUSANDTHS
    sizes = {"original": pictures.stored, "pixels": pictures.seen, "model": pictures.frame}
    width, height = sizes[coordinates](ref)
    return float(width), float(height)


def in_frame(place: Numbers, frame: Frame) -> Numbers:
    """Convert a place from shares of the picture to a frame: whole numbers, or four decimals if its sides are 1.

    A box is at least one of these units wide and high.
    """
    decimals = _UNIT_DECIMALS if frame == _UNIT else 0
    least = 10.0**-decimals
    numbers = [round(share * frame[axis % 2], decimals) for axis, share in enumerate(place)]
    for axis in (2, 3) if len(numbers) == 4 else ():
        numbers[axis] = round(max(numbers[axis], numbers[axis - 2] + least), decimals)
    return tuple(numbers)


def as_json(places: Sequence[Numbers], *, several: bool) -> str:
    """Places in the JSON of the Qwen families: `{"bbox_2d": [12, 40, 30, 60]}`, or a list of such objects."""
    objects = [{"bbox_2d" if len(place) == 4 else "point_2d": list(map(_whole, place))} for place in places]
    return json.dumps(objects if several else objects[0])


def _whole(number: float) -> float:
    return int(number) if number == int(number) else number
