"""Built-in tools on a picture of four colours: the pixels and lengths that a call returns, and its refusals."""

from __future__ import annotations

import math

import numpy as np
import pytest
from PIL import Image

from fovea_gym.tools.base import Frame, ToolError
from fovea_gym.tools.picture_tools import CROP, DRAW, MEASURE, ROTATE, ZOOM, ZOOM_AT
from gym_tests.tables import table
from gym_tests.tools.pictures import image_of, quartered, seen, text_of

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)
PIXELS = Frame(description="in pixels", size=lambda ref: Image.Image.copy(ref.source).size)  # type: ignore[arg-type]


def colours(image: Image.Image) -> set[tuple[int, ...]]:
    return {tuple(map(int, pixel)) for pixel in np.asarray(image).reshape(-1, 3)}


@table(("x", "y", "colour"), [(0, 0, RED), (500, 0, GREEN), (0, 500, BLUE), (500, 500, WHITE)])
def test_a_box_in_thousandths_is_cut_out_and_enlarged(x: int, y: int, colour: tuple[int, ...]) -> None:
    box = [x, y, x + 500, y + 500]
    zoomed, cropped = (image_of(tool, seen(quartered()), box=box) for tool in (ZOOM, CROP))
    assert colours(zoomed) == colours(cropped) == {colour}
    assert (zoomed.size, cropped.size) == ((80, 40), (40, 20))


def test_coordinates_are_in_the_frame_of_the_model_and_demonstrations_in_thousandths() -> None:
    tool, pictures = CROP.in_frame(PIXELS), seen(quartered())
    assert "in pixels" in str(tool.spec.parameters)
    assert "thousandths" in str(CROP.spec.parameters)
    assert image_of(tool, pictures, box=[40, 20, 80, 40]).size == (40, 20)
    shown = tool.demonstrated({"box": [500, 500, 1000, 1000], "image": 1}, pictures)
    assert shown == {"box": [40, 20, 80, 40], "image": 1}
    assert CROP.demonstrated(shown, pictures) == shown


def test_a_point_near_the_edge_keeps_its_magnification() -> None:
    image = image_of(ZOOM_AT, seen(quartered()), point=[0, 1000], factor=4)
    assert (colours(image), image.size) == ({BLUE}, (80, 40))
    assert colours(image_of(ZOOM_AT, seen(quartered()), point=[750, 250])) == {GREEN}


def test_a_picture_is_turned_clockwise() -> None:
    turned = image_of(ROTATE, seen(quartered()), degrees=90)
    assert turned.size == (40, 80)
    assert [turned.getpixel(place) for place in ((5, 5), (35, 5), (5, 75), (35, 75))] == [BLUE, RED, WHITE, GREEN]


def test_a_drawing_is_on_a_copy() -> None:
    picture = Image.new("RGB", (100, 100))
    box = image_of(DRAW, seen(picture), points=[900, 900, 100, 100], shape="box", colour="white")
    assert (box.getpixel((10, 50)), box.getpixel((50, 50))) == (WHITE, (0, 0, 0))
    line = image_of(DRAW, seen(picture), points=[0, 500, 1000, 500])
    assert line.getpixel((70, 50)) == RED
    dots = image_of(DRAW, seen(picture), points=[500, 500, 200, 200], shape="dots", colour="blue")
    assert (dots.getpixel((50, 50)), dots.getpixel((20, 20)), dots.getpixel((35, 35))) == (BLUE, BLUE, (0, 0, 0))
    assert colours(picture) == {(0, 0, 0)}


def test_lengths_angles_and_areas_are_in_pixels_of_the_file() -> None:
    # a triangle with sides of 30, 40 and 50 pixels on a picture of 80x40
    text = text_of(MEASURE, seen(quartered()), points=[0, 0, 500, 0, 500, 750])
    assert text == (
        "The picture is 80x40 pixels. Lengths in pixels: 40.0, 30.0. Angles in degrees: 90.0. "
        "Area of the polygon in pixels: 600.0."
    )
    assert "50.0" in text_of(MEASURE, seen(quartered()), points=[0, 0, 500, 750])
    assert math.hypot(40, 30) == 50


@table(
    ("tool", "arguments", "says"),
    [
        (ZOOM, {"box": [0, 0, 1001, 5]}, "1001, outside the picture; give x from 0 to 1000"),
        (ZOOM, {"box": [0, -1, 9, 9]}, "-1, outside the picture; give y from 0 to 1000"),
        (ZOOM, {"box": [500, 500, 100, 100]}, "x1 must be below x2"),
        (CROP, {"box": [500, 500, 501, 501]}, "1x1 pixels of the picture"),
        (CROP, {"box": [0, 0, 500, 500], "image": 2}, "there is no image 2; the conversation has 1"),
        (CROP, {"box": [0, 0, 500, 500], "image": 0}, "there is no image 0"),
        (DRAW, {"points": [0, 0, 5]}, "points has 3 numbers; give x and y"),
        (DRAW, {"points": [0, 0, 5, 5, 9, 9], "shape": "box"}, "a box has 2 points, not 3"),
    ],
)
def test_a_call_that_cannot_be_served_says_why(tool: object, arguments: dict[str, object], says: str) -> None:
    with pytest.raises(ToolError, match=says):
        image_of(tool, seen(quartered()), **arguments)  # type: ignore[arg-type]


def test_a_part_of_a_photo_is_enlarged_from_the_file_and_not_from_a_small_view() -> None:
    """Fine stripes that a view of a tenth of the size does not have are in the enlarged part."""
    stripes = np.zeros((400, 400, 3), np.uint8)
    stripes[:, ::2] = 255
    part = np.asarray(image_of(ZOOM, seen(Image.fromarray(stripes)), box=[0, 0, 25, 25]))
    assert part.shape == (400, 400, 3)
    assert part.std() > 80


def test_no_result_has_sides_much_longer_than_its_picture() -> None:
    """The largest results: a zoom is as large as the picture, and a turned picture at most the diagonal."""
    assert image_of(ZOOM, seen(quartered()), box=[0, 0, 100, 100]).size[0] <= 80
    assert image_of(ZOOM, seen(quartered()), box=[0, 0, 250, 1000]).size == (20, 40), "as far as its shape allows"
    assert max(image_of(ROTATE, seen(quartered()), degrees=45).size) <= math.hypot(80, 40) + 2
