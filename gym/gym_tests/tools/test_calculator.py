"""The calculator against Python's own arithmetic, and the texts that it refuses."""

from __future__ import annotations

import math
import random

import pytest

from fovea_gym.tools.base import ToolError
from fovea_gym.tools.calculator import Calculator, computed
from gym_tests.tables import table
from gym_tests.tools.pictures import text_of


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
    [("2^3^2", 512.0), ("-2^2", -4.0), ("2^-1", 0.5), ("1e3 + .5", 1000.5), ("--3", 3.0), ("log(e)", 1.0)],
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
        ("(" * 60 + "1" + ")" * 60, "nests more than 50 deep"),
        ("-" * 100 + "1", "nests more than 50 deep"),
        ("1/0", "no value"),
        ("sqrt(-1)", "no value"),
        ("(-8)^0.5", "not real"),
        ("min()", "neither a number nor a function"),
        ("sin(1, 2)", "no value"),
        ("2 3", "where an operator was expected"),
        ("(2", "'\\)' is missing"),
        ("2 +", "ends where a number was expected"),
        ("", "ends where a number was expected"),
    ],
)
def test_other_texts_are_refused_in_one_line(text: str, says: str) -> None:
    with pytest.raises(ToolError, match=says) as caught:
        computed(text)
    assert "\n" not in str(caught.value)


def test_the_tool_answers_with_a_number() -> None:
    assert text_of(Calculator(), expression="hypot(3, 4) * 2") == "10"
    assert text_of(Calculator(), expression="2 / 3") == "0.666666666667"
