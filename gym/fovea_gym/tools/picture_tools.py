"""Built-in tools that enlarge, change or measure a picture; coordinates are lists [x, y, ...]."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

from PIL import Image, ImageDraw

from fovea_gym.tools.base import PICTURE_NUMBER, THOUSANDTHS, Frame, Picture, ToolError, object_schema
from fovea_gym.types import ImageRef, ToolSpec

Result: TypeAlias = Image.Image | str
Apply: TypeAlias = Callable[[Image.Image, list[float], Mapping[str, Any]], Result]
"""A function of the picture, the coordinates in its pixels, and the other arguments."""
MIN_SIDE_PX = 2
COLOURS = ("red", "green", "blue", "yellow", "white", "black")


class Coordinates(NamedTuple):
    """Name, description and number of values of an argument that holds coordinates."""

    name: str
    about: str
    fewest: int
    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureTool:
    """A tool that works on one picture of the conversation."""

    name: str
    about: str
    """Description of the tool, without its coordinates."""
    apply: Apply
    coordinates: Coordinates | None = None
    others: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """JSON schemas of the other arguments."""
    required: tuple[str, ...] = ()
    """Names of the other arguments that have no default."""
    frame: Frame = THOUSANDTHS

    @property
    def spec(self) -> ToolSpec:
        places: dict[str, Mapping[str, object]] = {}
        if self.coordinates is not None:
            name, about, fewest, most = self.coordinates
            numbers = {"type": "array", "items": {"type": "number"}, "minItems": fewest, "maxItems": most}
            places[name] = numbers | {"description": f"{about}; {self.frame.description}."}
        parameters = object_schema({**places, **self.others, "image": PICTURE_NUMBER}, [*places, *self.required])
        return ToolSpec(name=self.name, description=self.about, parameters=parameters)

    async def call(self, arguments: Mapping[str, object], pictures: Sequence[Picture]) -> Sequence[str | ImageRef]:
        # in a thread, since decoding and resizing a photo takes tens of milliseconds
        result = await asyncio.to_thread(self._result, arguments, _picture(arguments, pictures))
        return (result if isinstance(result, str) else ImageRef(source=result, where=f"the result of {self.name}"),)

    def in_frame(self, frame: Frame) -> PictureTool:
        return replace(self, frame=frame)

    def demonstrated(self, arguments: Mapping[str, object], pictures: Sequence[Picture]) -> Mapping[str, object]:
        if self.coordinates is None or self.coordinates.name not in arguments:
            return arguments
        values: Any = arguments[self.coordinates.name]
        size = self.frame.size(_picture(arguments, pictures).seen)
        scaled = [round(value * size[axis % 2] / 1000) for axis, value in enumerate(values)]
        return {**arguments, self.coordinates.name: scaled}

    def _result(self, arguments: Mapping[str, object], picture: Picture) -> Result:
        image = picture.opened()
        places: list[float] = []
        if self.coordinates is not None:
            places = self._in_pixels(self.coordinates.name, arguments[self.coordinates.name], picture, image)
        return self.apply(image, places, arguments)

    def _in_pixels(self, name: str, values: Any, picture: Picture, image: Image.Image) -> list[float]:
        """Coordinates in pixels of the picture; ToolError for an odd number of values, or one outside the picture."""
        if len(values) % 2:
            raise ToolError(f"{name} has {len(values)} numbers; give x and y of every point")
        frame = self.frame.size(picture.seen)
        for axis, value in enumerate(values):
            if not 0 <= value <= frame[axis % 2]:
                raise ToolError(
                    f"{name} holds {value:g}, outside the picture; give {'xy'[axis % 2]} from 0 to {frame[axis % 2]}"
                )
        return [value * image.size[axis % 2] / frame[axis % 2] for axis, value in enumerate(values)]


def _picture(arguments: Mapping[str, object], pictures: Sequence[Picture]) -> Picture:
    number = arguments.get("image", 1)
    if not isinstance(number, int) or not 1 <= number <= len(pictures):
        raise ToolError(f"there is no image {number}; the conversation has {len(pictures)}, numbered from 1")
    return pictures[number - 1]


def _cut(image: Image.Image, box: Sequence[float]) -> Image.Image:
    """The part of a picture inside a box, in whole pixels; ToolError for a box that is too small."""
    left, top = math.floor(box[0]), math.floor(box[1])
    right, bottom = math.ceil(box[2]), math.ceil(box[3])
    if min(right - left, bottom - top) < MIN_SIDE_PX:
        raise ToolError(
            f"the box is {right - left}x{bottom - top} pixels of the picture; x1 must be below x2 and y1 below y2, "
            f"{MIN_SIDE_PX} pixels apart or more"
        )
    return image.crop((left, top, right, bottom))


def _enlarged(part: Image.Image, image: Image.Image) -> Image.Image:
    """A part of a picture, enlarged to fit the picture's size without changing the part's shape."""
    factor = min(image.width / part.width, image.height / part.height)
    size = (max(1, round(part.width * factor)), max(1, round(part.height * factor)))
    return part.resize(size, Image.Resampling.BICUBIC)


def _zoom_at(image: Image.Image, point: list[float], others: Mapping[str, Any]) -> Image.Image:
    factor = others.get("factor", 2)
    width, height = image.width / factor, image.height / factor
    left = min(max(point[0] - width / 2, 0), image.width - width)
    top = min(max(point[1] - height / 2, 0), image.height - height)
    return _enlarged(_cut(image, (left, top, left + width, top + height)), image)


def _draw(image: Image.Image, places: list[float], others: Mapping[str, Any]) -> Image.Image:
    drawn, colour = image.copy(), others.get("colour", "red")
    width = max(1, round(max(image.size) / 200))
    pen, points = ImageDraw.Draw(drawn), _points(places)
    if others.get("shape", "line") == "box":
        if len(points) != 2:
            raise ToolError(f"a box has 2 points, not {len(points)}; give left, top, right, bottom")
        (x1, y1), (x2, y2) = points
        pen.rectangle((min(x1, x2), min(y1, y2), max(x1, x2), max(y1, y2)), outline=colour, width=width)
    elif others.get("shape") == "dots" or len(points) == 1:
        for x, y in points:
            pen.ellipse((x - 2 * width, y - 2 * width, x + 2 * width, y + 2 * width), fill=colour)
    else:
        pen.line(points, fill=colour, width=width)
    return drawn


def _measure(image: Image.Image, places: list[float], _others: Mapping[str, Any]) -> str:
    points = _points(places)
    lengths = [math.dist(one, other) for one, other in pairwise(points)]
    angles = [_angle(*corner) for corner in zip(points, points[1:], points[2:], strict=False)]
    lines = [f"The picture is {image.width}x{image.height} pixels."]
    lines += [f"Lengths in pixels: {', '.join(f'{length:.1f}' for length in lengths)}."]
    if angles:
        lines += [f"Angles in degrees: {', '.join(f'{angle:.1f}' for angle in angles)}."]
        lines += [f"Area of the polygon in pixels: {_area(points):.1f}."]
    return " ".join(lines)


def _angle(one: tuple[float, float], corner: tuple[float, float], other: tuple[float, float]) -> float:
    """The angle at the corner in degrees, from 0 to 180."""
    arms = [math.atan2(point[1] - corner[1], point[0] - corner[0]) for point in (one, other)]
    turn = abs(math.degrees(arms[0] - arms[1])) % 360
    return min(turn, 360 - turn)


def _area(points: Sequence[tuple[float, float]]) -> float:
    closed = pairwise([*points, points[0]])
    return abs(sum(x1 * y2 - x2 * y1 for (x1, y1), (x2, y2) in closed)) / 2


def _points(places: Sequence[float]) -> list[tuple[float, float]]:
    return list(zip(places[::2], places[1::2], strict=True))


_BOX = Coordinates("box", "[x1, y1, x2, y2], left, top, right, bottom", 4, 4)
ZOOM = PictureTool(
    name="zoom",
    about="Enlarge a box of a picture.",
    apply=lambda image, box, _others: _enlarged(_cut(image, box), image),
    coordinates=_BOX,
)
ZOOM_AT = PictureTool(
    name="zoom_at",
    about="Enlarge a picture around a point.",
    apply=_zoom_at,
    coordinates=Coordinates("point", "[x, y] of the middle", 2, 2),
    others={
        "factor": {"type": "number", "minimum": 1, "maximum": 16, "description": "Magnification, 1 to 16. Default: 2."}
    },
)
CROP = PictureTool(
    name="crop",
    about="Cut a box out of a picture, without enlarging it.",
    apply=lambda image, box, _others: _cut(image, box),
    coordinates=_BOX,
)
ROTATE = PictureTool(
    name="rotate",
    about="Turn a picture clockwise.",
    apply=lambda image, _, others: image.rotate(-others["degrees"], Image.Resampling.BICUBIC, expand=True),
    others={"degrees": {"type": "number", "minimum": -360, "maximum": 360, "description": "Angle, clockwise."}},
    required=("degrees",),
)
DRAW = PictureTool(
    name="draw",
    about="Draw a line, a box or dots onto a copy of a picture.",
    apply=_draw,
    coordinates=Coordinates(
        "points", "[x1, y1, x2, y2, ...] of the line's points, the dots, or two corners of the box", 2, 40
    ),
    others={
        "shape": {"type": "string", "enum": ["line", "box", "dots"], "description": "Default: line."},
        "colour": {"type": "string", "enum": list(COLOURS), "description": "Default: red."},
    },
)
MEASURE = PictureTool(
    name="measure",
    about="Measure the lengths between points of a picture in its pixels, the angles at them, and the area inside.",
    apply=_measure,
    coordinates=Coordinates("points", "[x1, y1, x2, y2, ...] of two points or more", 4, 40),
)
PICTURE_TOOLS = (ZOOM, ZOOM_AT, CROP, ROTATE, DRAW, MEASURE)
