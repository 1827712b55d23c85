"""Built-in tools, functions as tools, and names in `tools`."""

from __future__ import annotations

import asyncio
import math
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from PIL import Image

from fovea_gym.errors import ConfigError
from fovea_gym.tools.base import Frame, ToolError
from fovea_gym.tools.calculator import Calculator, computed
from fovea_gym.tools.function import function_tool
from fovea_gym.tools.loading import load_tools
from fovea_gym.tools.picture_tools import CROP, DRAW, MEASURE, ROTATE, ZOOM, ZOOM_AT
from fovea_gym.types import ImageRef
from gym_tests.tables import table
from gym_tests.tools.pictures import image_of, parts_of, quartered, seen, text_of


def expression(rng: random.Random, depth: int) -> str:
    """A random expression that Python reads as the calculator does."""
    if depth == 0 or rng.random() < 0.2:
        return rng.choice([str(rng.randint(0, 20)), f"{rng.random():.3f}", "pi"])
    inner = [expression(rng, depth - 1) for _ in range(2)]
    forms = ("({0} + {1})", "{0} - {1}", "{0} * {1}", "{0} / ({1} + 50)", "-{0}", "sqrt(abs({0}))", "max({0}, {1})")
    return rng.choice((*forms, "{0} * -{1}", "({0}) ** 2", "round({0}) % 7")).format(*inner)


def test_random_expressions_have_the_values_of_python() -> None:
    rng, names = random.Random(0), {"pi": math.pi, "sqrt": math.sqrt, "abs": abs, "max": max, "round": round}
    texts = [text for text in (expression(rng, 3) for _ in range(500)) if len(text) <= 200]
    assert len(texts) > 400
    for text in texts:
        assert computed(text) == pytest.approx(eval(text, {"__builtins__": {}}, names)), text


@table(
    ("text", "value"),
    [("2^3^2", 512), ("-2^2", -4), ("2^-1", 0.5), ("1e3 + .5", 1000.5), ("--3", 3), ("log(e)", 1)],
)
def test_signs_and_powers_bind_as_in_mathematics(text: str, value: float) -> None:
    assert computed(text) == pytest.approx(value)


@table(
    ("text", "says"),
    [
        ("__import__('os')", "cannot be read"),
        ("os(1)", "'os' is neither a number nor a function"),
        ("9^9^9^9", "no value|beyond 1e"),
        ("9" * 101, "beyond 1e"),
        ("1" + "+1" * 200, "401 characters; the limit is 200"),
        *((text, "nests more than 50 deep") for text in ("(" * 60 + "1" + ")" * 60, "-" * 100 + "1")),
        *((text, "no value") for text in ("1/0", "sqrt(-1)", "sin(1, 2)")),
        ("(-8)^0.5", "not real"),
        ("min()", "neither a number nor a function"),
        ("2 3", "where an operator was expected"),
        ("(2", "'\\)' is missing"),
        *((text, "ends where a number was expected") for text in ("2 +", "")),
    ],
)
def test_other_texts_are_refused_in_one_line(text: str, says: str) -> None:
    with pytest.raises(ToolError, match=says) as caught:
        computed(text)
    assert "\n" not in str(caught.value)


def test_the_tool_answers_with_a_number() -> None:
    texts = [text_of(Calculator(), expression=text) for text in ("hypot(3, 4) * 2", "2 / 3")]
    assert texts == ["10", "0.666666666667"]


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


def area(width: float, height: float = 1.0, unit: Literal["px", "mm"] = "px", note: str | None = None) -> str:
    """Compute an area.

    Args:
        width: The width.
        height: The height.
        unit: The unit of both.
        note: A remark.
    """
    return f"{width * height:g} {unit}"


def brightness(image: Image.Image, box: list[int]) -> float:
    """Mean brightness in a box of a picture.

    Args:
        box: Left, top, right and bottom in pixels.
    """
    return float(np.asarray(image.crop(tuple(box))).mean())  # type: ignore[arg-type]


def count(images: list[Image.Image]) -> int:
    """Count the pictures so far."""
    return len(images)


async def later(seconds: float) -> dict[str, float]:
    """Wait.

    Args:
        seconds: How long.
    """
    await asyncio.sleep(seconds)
    return {"waited": seconds}


def test_functions_are_called_with_arguments_and_pictures() -> None:
    assert text_of(function_tool(area, "area"), width=2.0, unit="mm") == "2 mm"
    assert text_of(function_tool(later, "later"), seconds=0.0) == '{"waited": 0.0}'
    assert text_of(function_tool(count, "count"), seen(quartered(), quartered())) == "2"
    tool, pictures = function_tool(brightness, "brightness"), seen(Image.new("RGB", (9, 9)), quartered())
    assert text_of(tool, pictures, box=[0, 0, 9, 9]) == "0.0"
    assert text_of(tool, pictures, box=[45, 25, 80, 40], image=2) == "255.0"
    assert sorted(tool.spec.parameters["properties"]) == ["box", "image"]  # type: ignore[call-overload]
    assert tool.spec.parameters["required"] == ["box"]
    with pytest.raises(ToolError, match=r"picture 3\b.*\b2\b"):
        text_of(tool, pictures, box=[0, 0, 9, 9], image=3)


def of(result: object) -> Callable[[], object]:
    def made() -> object:
        """Return it."""
        return result

    return made


@table(
    ("result", "parts"),
    [
        *(("text", ["text"]), (3, ["3"]), (True, ["true"]), (np.float32(0.5), ["0.5"])),
        ([1, 2.5, [3]], ["[1, 2.5, [3]]"]),
        ({"a": np.int64(2), "b": [1], "ü": "雪"}, ['{"a": 2, "b": [1], "ü": "雪"}']),
        (["seen:", {"n": 1}], ["seen:", '{"n": 1}']),
    ],
)
def test_plain_results_are_texts(result: object, parts: list[str]) -> None:
    assert parts_of(function_tool(of(result), "made")) == parts


def test_pictures_may_stand_between_texts() -> None:
    ref, values = ImageRef(source=b"x"), np.zeros((2, 3, 3), np.uint8)
    found = parts_of(function_tool(of(["here:", quartered(), values, ref]), "made"))
    assert [type(part) for part in found] == [str, ImageRef, ImageRef, ImageRef]


@table(
    ("result", "says"),
    [
        (None, "made returned an object of type NoneType; a tool returns a text, a number"),
        (object(), "made returned an object of type object"),
        ({"a": object()}, r"made returned a value that is not JSON \(object in it\)"),
        (b"bytes", "made returned an object of type bytes"),
    ],
)
def test_a_result_of_another_type_is_named(result: object, says: str) -> None:
    with pytest.raises(ToolError, match=says):
        parts_of(function_tool(of(result), "made"))


def no_docstring(x: int) -> int:
    return x


def no_type(x) -> int:  # type: ignore[no-untyped-def]
    """Do it.

    Args:
        x: A number.
    """
    return int(x)


def several(*numbers: int) -> int:
    """Add numbers."""
    return sum(numbers)


def undescribed(x: int) -> int:
    """Do it."""
    return x


def own_type(x: Sequence[complex]) -> int:
    """Do it.

    Args:
        x: Numbers.
    """
    return len(x)


def unknown_type(x: Missing) -> int:  # type: ignore[name-defined]  # noqa: F821
    """Do it."""
    return 0


@table(
    ("function", "says"),
    [
        (no_docstring, "mine.py:tool has no docstring, which the model needs as its description; describe there"),
        (no_type, "mine.py:tool has no type for x; annotate it, such as x: float"),
        (several, r"mine.py:tool takes \*numbers: 'int'; give every argument a separate name"),
        (undescribed, r"cannot be described .* \(ValueError: the docstring has no description of x\).*every argument"),
        (own_type, r"mine.py:tool cannot be described .* \(ValueError: the type .* has no JSON schema\); use str, int"),
        (unknown_type, r"mine.py:tool has a type that cannot be read \(NameError: name 'Missing'"),
        (lambda x: x, r"mine.py:tool has no name \(<lambda>\); write it as def NAME"),
        (3, "mine.py:tool is of type int; name a function or a tool"),
    ],
)
def test_a_function_that_cannot_be_a_tool_is_named_with_the_fix(function: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        function_tool(function, "mine.py:tool")
    assert "\n" not in str(caught.value)


def test_a_tool_that_leaves_the_program_is_a_failed_call() -> None:
    def leaving() -> str:
        """Leave the program."""
        sys.exit(3)

    with pytest.raises(ToolError, match="leaving raised SystemExit: 3"):
        parts_of(function_tool(leaving, "leaving"))


TEN_LINES = '''
from PIL import Image

def brightness(image: Image.Image, channel: int = 0) -> float:
    """Mean brightness of a picture.

    Args:
        channel: 0 for red, 1 for green, 2 for blue.
    """
    values = list(image.getchannel(channel).getdata())
    return sum(values) / len(values)

def zoom(factor: int) -> str:
    """Another zoom.

    Args:
        factor: A number.
    """
    return str(factor)

NUMBER = 3
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(TEN_LINES)
    return tmp_path / "mine.py"


def test_tools_are_built_in_or_in_files_and_modules(file: Path) -> None:
    module = "fovea_gym.tools.picture_tools:ZOOM_AT"
    tools = load_tools(["zoom", "calculator", f"{file}:brightness", module], allow_python=False)
    assert [tool.spec.name for tool in tools] == ["zoom", "calculator", "brightness", "zoom_at"]
    (tool,) = load_tools(["python:fovea.Calculator"], allow_python=False, given=[Calculator()])
    assert tool.spec.name == "calculator"


@table(
    ("names", "says"),
    [
        ("zoom {file}:zoom", "zoom and .*mine.py:zoom"),
        ("zooom", "no built-in tool is called zooom; did you mean zoom?"),
        ("browser", "no built-in tool is called browser; name one of zoom, zoom_at, .*, or path/to/file.py:function"),
        ("missing.py:f", "tools=missing.py:f: there is no file missing.py"),
        ("{file}:brightnes", "has no brightnes; did you mean brightness?"),
        ("{file}:NUMBER", "is of type int; name a function or a tool"),
        ("no_such_module:f", "tools=no_such_module:f cannot be imported: it raised ModuleNotFoundError"),
        ("python:__main__.f", "is an object that was passed from Python code"),
        ("python", "set allow_python=true if you want that"),
    ],
)
def test_a_name_without_a_tool_or_of_two_is_one_line_with_the_fix(names: str, says: str, file: Path) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        load_tools([*names.format(file=file).split()], allow_python=False)
    assert "\n" not in str(caught.value)
