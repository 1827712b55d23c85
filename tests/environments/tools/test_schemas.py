"""Functions as tools have the schemas of transformers' `get_json_schema`, for whose form chat templates are written."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Literal, Optional, Union

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException, get_json_schema

from fovea_gym.errors import ConfigError
from fovea_gym.tools.function import function_tool
from gym_tests.tables import table


class Unit(Enum):
    PX = "px"
    MM = "mm"


class Mixed(Enum):
    ONE = 1
    NAME = "name"
    HALF = 0.5


class Made(Enum):
    VALUE = (1, 2)


def area(width: float, height: float = 1.0, unit: Literal["px", "mm"] = "px", note: str | None = None) -> str:
    """Compute an area.

    Args:
        width: The width.
        height: The height.
        unit: The unit of both.
        note: A remark.
    """
    return f"{width * height:g} {unit}"


def nothing() -> None:
    """Do nothing.

    It says so
        in three lines.
    """


def long_texts(first: int, second: list[dict[str, tuple[int, str]]]) -> str:
    """
    Read two arguments: both

    are described over several lines.

    Args:
        first: The first. Note: a colon
            and a line that goes on,

            behind an empty one.
        second:
            A text that begins on its own line: here
          and ends here.

    Returns:
        str: Both.

    Raises:
        ValueError: never
    """
    return f"{first}{second}"


def choices(colour: str, size: int = 3) -> None:
    """Choose.

    Args:
        colour: The colour (choices: ["red", " green ", "blue"])
        size: The size, in pixels (Choices: [1, 2, 3])
    """


def returns_first(x: Unit, *, y: bool) -> dict[str, Any]:
    """Two sections in the other order.

    Returns:
        What it is.

    Args:
        x: One.
        y: Other.
    """
    return {"x": x, "y": y}


def no_arguments_described(x: int) -> None:
    """Say nothing of x."""


class Tools:
    def method(self, x: int) -> None:
        """A method.

        Args:
            x: A number.
        """


def taking(hint: object) -> Callable[..., None]:
    """A function with one argument of a type."""

    def taken(x):  # type: ignore[no-untyped-def]
        """Take.

        Args:
            x: It.
        """

    taken.__annotations__ = {"x": hint}
    return taken


def same(function: Callable[..., Any]) -> None:
    spec, theirs = function_tool(function, "mine.py:tool").spec, get_json_schema(function)["function"]
    described = {"name": spec.name, "description": spec.description, "parameters": spec.parameters}
    assert described == {key: theirs[key] for key in described}


@table("function", [area, nothing, long_texts, choices, returns_first, Tools().method])
def test_functions(function: Callable[..., Any]) -> None:
    same(function)


@table(
    "hint",
    [
        *(int, float, str, bool, type(None), Any, list, dict, tuple),
        *(Unit, Mixed, Optional[Unit], Unit | Mixed),  # noqa: UP045
        *(Literal["a", "b"], Literal[1, "a", 2], Literal[True, 1], Literal["a", None], Literal["a"] | Literal[1]),
        *(int | str, str | int, int | float | None, Union[int, None], int | bool | str | None),  # noqa: UP007
        *(list[int], list[int | str], list[list[float]], list[Any], list[Unit], list[int] | None, list[int] | str),
        *(dict[str, int], dict[str, dict[str, list[float]]], dict[str, int | None], dict[str, Any] | None),
        *(tuple[int, str], tuple[int, int, int], tuple[list[int], dict[str, float]], list[tuple[float, float]]),
        *(tuple[int | None, Literal["a", "b"]], dict[str, tuple[int, Unit]], tuple[int, str] | list[int] | None),
    ],
)
def test_types(hint: object) -> None:
    same(taking(hint))


LEAVES = [int, float, str, bool, Any, Unit, Mixed, Literal["a", "b"], Literal[1, "a"], list, dict]


def larger(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    pairs = st.tuples(inner, inner)
    return (
        inner.map(lambda x: list[x])
        | inner.map(lambda x: dict[str, x])
        | inner.map(lambda x: Optional[x])  # noqa: UP045
        | pairs.map(lambda x: tuple[x[0], x[1]])
        | pairs.map(lambda x: Union[x[0], x[1]])  # noqa: UP007
    )


@given(hint=st.recursive(st.sampled_from(LEAVES), larger, max_leaves=6))
def test_types_in_types(hint: Any) -> None:
    same(taking(hint))


@table(
    "function",
    [
        *map(taking, (complex, set[int], Sequence[int], tuple[int], tuple[int, ...], Literal[b"a"], Made, math.inf)),
        *map(taking, (list[complex], dict[str, complex], int | complex, Tools)),
        no_arguments_described,
    ],
)
def test_what_transformers_refuses_is_an_error(function: Callable[..., Any]) -> None:
    with pytest.raises((TypeHintParsingException, DocstringParsingException, TypeError, ValueError)):
        get_json_schema(function)
    with pytest.raises(ConfigError, match=r"mine\.py:tool cannot be described to the model"):
        function_tool(function, "mine.py:tool")
