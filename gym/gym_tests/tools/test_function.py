"""Functions as tools: pictures are given, and what cannot be a tool is named."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import pytest
from PIL import Image

from fovea_gym.errors import ConfigError
from fovea_gym.tools.base import ToolError
from fovea_gym.tools.function import function_tool
from fovea_gym.types import ImageRef
from gym_tests.tables import table
from gym_tests.tools.pictures import parts_of, quartered, seen, text_of


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
        ("text", ["text"]),
        (3, ["3"]),
        (True, ["true"]),
        (np.float32(0.5), ["0.5"]),
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
        (
            no_docstring,
            "mine.py:tool has no docstring, which the model needs as its description; describe there what it does",
        ),
        (no_type, "mine.py:tool has no type for x; annotate it, such as x: float"),
        (several, r"mine.py:tool takes \*numbers: 'int'; give every argument a separate name"),
        (
            undescribed,
            r"cannot be described .* \(ValueError: the docstring has no description of x\).*every argument below",
        ),
        (
            own_type,
            r"mine.py:tool cannot be described .* \(ValueError: the type .* has no JSON schema\); use str, int, float",
        ),
        (unknown_type, r"mine.py:tool has a type that cannot be read \(NameError: name 'Missing'"),
        (lambda x: x, r"mine.py:tool has no name \(<lambda>\); write it as def NAME"),
        (3, "mine.py:tool is of type int; name a function or a tool"),
    ],
)
def test_a_function_that_cannot_be_a_tool_is_named_with_the_fix(function: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        function_tool(function, "mine.py:tool")
    assert "\n" not in str(caught.value)


def leaving() -> str:
    """Leave the program."""
    sys.exit(3)


def test_a_tool_that_leaves_the_program_is_a_failed_call() -> None:
    with pytest.raises(ToolError, match="leaving raised SystemExit: 3"):
        parts_of(function_tool(leaving, "leaving"))
