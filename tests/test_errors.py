"""Errors that cross a process border arrive as they were raised, and the gym's name no setting of a run."""

from __future__ import annotations

import ast
import importlib
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest
from pydantic import BaseModel, PositiveInt, model_validator

import fovea
import fovea_gym
from fovea.config.run import Config
from fovea.errors import MicrobatchMemoryError
from fovea_gym.errors import (
    BadRowError,
    ConfigError,
    FailedEpisodeError,
    FoveaError,
    SeveralErrors,
    describe_error,
    first_line,
    result_or_error,
)
from gym_tests.tables import table

MORE_ARGUMENTS: dict[type[FoveaError], tuple[object, ...]] = {MicrobatchMemoryError: (512,)}
MORE_ARGUMENTS |= {BadRowError: ("image_damaged",), FailedEpisodeError: ("reply", -1.0)}
"""Arguments behind the message, of the errors that take some."""
PACKAGE = Path(fovea.__file__).parent


def subclasses(of: type[FoveaError]) -> Iterator[type[FoveaError]]:
    yield of
    for each in of.__subclasses__():
        yield from subclasses(each)


def all_errors() -> list[type[FoveaError]]:
    for file in PACKAGE.rglob("*.py"):
        if re.search(r"^class \w+Error\(", file.read_text(encoding="utf-8"), re.MULTILINE):
            importlib.import_module(".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts))
    found = (each for each in subclasses(FoveaError) if each.__module__.startswith(("fovea.", "fovea_gym.")))
    return sorted(set(found), key=lambda each: each.__name__)


@table("kind", all_errors())
def test_an_error_and_its_fix_survive_a_process_border(kind: type[FoveaError]) -> None:
    first = [ConfigError("the message")] if kind is SeveralErrors else "the message"
    error = kind(first, *MORE_ARGUMENTS.get(kind, ()))
    arrived = pickle.loads(pickle.dumps(error))
    assert type(arrived) is kind
    assert (str(arrived), repr(vars(arrived))) == ("the message", repr(vars(error)))
    arrived = pickle.loads(pickle.dumps(BadRowError("row 3: half; an image", "image_damaged", "copy it again")))
    assert str(arrived) == "row 3: half; an image; copy it again"
    assert (arrived.problem, arrived.reason, arrived.fix) == ("row 3: half; an image", "image_damaged", "copy it again")


ARGUMENTS_OF_THE_GYM = {"environment", "judge", "reward"}
"""Sections of a run that the gym has under the same names: of a part of a mixture, and `Access.judge`."""


def texts_of(file: Path) -> Iterator[tuple[int, str]]:
    """Line and text of the string constants of a file, without docstrings."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.lineno, node.value


def test_no_text_of_the_gym_names_a_setting_of_a_run() -> None:
    """Who uses the gym without fovea has no such setting; where a run makes the environment, fovea adds the name."""
    sections = Config.model_fields.keys() - ARGUMENTS_OF_THE_GYM
    of_a_run = re.compile(rf"(?<![\w.])(?:(?:{'|'.join(sections)})\.(?!md\b)[a-z_]+|(?:{'|'.join(sections)})=(?![=']))")
    package = Path(fovea_gym.__file__).parent
    texts = [(file.relative_to(package), *each) for file in package.rglob("*.py") for each in texts_of(file)]
    assert [each for each in texts if of_a_run.search(each[2])] == []


class Section(BaseModel):
    size: PositiveInt = 1

    @model_validator(mode="after")
    def check(self) -> Self:
        if self.size > 3:
            raise ValueError("size 4 is more than 3")
        return self


@pytest.mark.parametrize(
    ("size", "message"),
    [(4, "ValidationError: size 4 is more than 3"), (0, "ValidationError: size: Input should be greater than 0")],
)
def test_the_faults_that_pydantic_found_are_told_and_not_their_number(size: int, message: str) -> None:
    _, error = result_or_error(lambda: Section(size=size))
    assert error is not None
    assert first_line(error) == message


def test_an_exception_without_text_is_told_by_its_statement() -> None:
    """As vLLM's, where a weight has another shape than its own."""

    def check() -> None:
        assert len("abc") == 4

    _, error = result_or_error(check)
    assert error is not None
    error.args = ()  # pytest has given it a text
    assert re.fullmatch(r"AssertionError at test_errors.py:\d+, `assert len\(\"abc\"\) == 4`", first_line(error))
    assert re.fullmatch(r"raised AssertionError at \S*test_errors.py:\d+", describe_error(error))
    assert first_line(ValueError("bad length\nmore")) == "ValueError: bad length"
    assert first_line(KeyError()) == "KeyError"
