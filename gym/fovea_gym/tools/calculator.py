"""A calculator for the model, with a grammar of numbers and a few functions; the model's text is never eval'ed."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from math import acos, asin, atan, ceil, cos, degrees, exp, floor, hypot, log, radians, sin, sqrt, tan
from typing import Any

from fovea_gym.tools.base import Picture, ToolError, object_schema
from fovea_gym.types import ImageRef, ToolSpec

MAX_CHARACTERS = 200
MAX_DEPTH = 50
LARGEST = 1e100
"""Results beyond this are refused, so that numbers never take much memory."""
_TOKEN = re.compile(r"\s*(?:(\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?)|([A-Za-z]+)|(\*\*|[-+*/%^(),]))")
_CALLABLE: tuple[Any, ...] = (
    *(sqrt, abs, round, floor, ceil, sin, cos, tan, asin, acos, atan, exp, log, hypot, degrees, radians, min, max),
)
_FUNCTIONS = {function.__name__: function for function in _CALLABLE}
_CONSTANTS = {"pi": math.pi, "e": math.e}


class Calculator:
    """Tool that computes the value of an expression."""

    spec = ToolSpec(
        name="calculator",
        description=(
            "Compute an expression of numbers with + - * / % ^ and parentheses; pi, e, and the functions "
            f"{', '.join(_FUNCTIONS)}. Angles are in radians."
        ),
        parameters=object_schema(
            {"expression": {"type": "string", "description": "The expression, such as sqrt(3^2 + 4^2)."}},
            ["expression"],
        ),
    )

    async def call(self, arguments: Mapping[str, object], _pictures: Sequence[Picture]) -> Sequence[str | ImageRef]:
        return (f"{computed(str(arguments['expression'])):.12g}",)


def computed(expression: str) -> float:
    """The value of an expression; ToolError if it has none."""
    if len(expression) > MAX_CHARACTERS:
        raise ToolError(f"the expression has {len(expression)} characters; the limit is {MAX_CHARACTERS}")
    try:
        return _Reader(expression).whole()
    except (ArithmeticError, ValueError, TypeError) as error:
        raise ToolError(f"the expression has no value ({error}); correct it") from error


class _Reader:
    """Evaluates an expression from left to right, respecting the precedence of operators."""

    def __init__(self, expression: str) -> None:
        self._tokens = _tokens(expression)
        self._place = 0
        self._depth = 0

    def whole(self) -> float:
        value = self._sum()
        if self._place < len(self._tokens):
            raise ToolError(f"there is {self._tokens[self._place]!r} where an operator was expected; correct it")
        return value

    def _sum(self) -> float:
        value = self._product()
        while (sign := self._take("+", "-")) is not None:
            other = self._product()
            value = _bounded(value + other if sign == "+" else value - other)
        return value

    def _product(self) -> float:
        value = self._signed()
        while (sign := self._take("*", "/", "%")) is not None:
            other = self._signed()
            value = _bounded(value * other if sign == "*" else value / other if sign == "/" else value % other)
        return value

    def _signed(self) -> float:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ToolError(f"the expression nests more than {MAX_DEPTH} deep; compute it in parts")
        sign = self._take("+", "-")
        value = self._power() if sign is None else self._signed()
        self._depth -= 1
        return -value if sign == "-" else value

    def _power(self) -> float:
        base = self._atom()
        if self._take("^", "**") is None:
            return base
        value = float(base) ** float(self._signed())
        if isinstance(value, complex):
            raise ToolError("a root of a negative number is not real; correct the expression")
        return _bounded(value)

    def _atom(self) -> float:
        token = self._next()
        if token == "(":
            value = self._sum()
            self._expect(")")
            return value
        if token[0].isdigit() or token[0] == ".":
            return _bounded(float(token))
        if token in _CONSTANTS:
            return _CONSTANTS[token]
        if token not in _FUNCTIONS:
            raise ToolError(f"{token!r} is neither a number nor a function; the functions are {', '.join(_FUNCTIONS)}")
        self._expect("(")
        arguments = [self._sum()]
        while self._take(",") is not None:
            arguments.append(self._sum())
        self._expect(")")
        return _bounded(float(_FUNCTIONS[token](*arguments)))

    def _next(self) -> str:
        if self._place == len(self._tokens):
            raise ToolError("the expression ends where a number was expected; complete it")
        self._place += 1
        return self._tokens[self._place - 1]

    def _take(self, *signs: str) -> str | None:
        if self._place < len(self._tokens) and self._tokens[self._place] in signs:
            return self._next()
        return None

    def _expect(self, sign: str) -> None:
        if self._take(sign) is None:
            raise ToolError(f"{sign!r} is missing; correct the expression")


def _tokens(expression: str) -> list[str]:
    found, place = list[str](), 0
    while expression[place:].strip():
        match = _TOKEN.match(expression, place)
        if match is None:
            raise ToolError(
                f"{expression[place:].strip()[:20]!r} cannot be read; write numbers, + - * / ^ and functions"
            )
        found.append(match[match.lastindex or 0])
        place = match.end()
    return found


def _bounded(value: float) -> float:
    if not abs(value) <= LARGEST:
        raise ToolError(f"a value of the expression is beyond {LARGEST:g}; compute with smaller numbers")
    return value
