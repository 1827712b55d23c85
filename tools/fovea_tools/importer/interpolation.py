"""References in the values of OmegaConf: `${runner.seq_length}`, `${subtract:${a.b}, 1}`, `${oc.select:a.b,512}`."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from fovea.config.recipes import read_yaml
from fovea_gym.errors import ConfigError
from fovea_gym.settings.type_text import show

SHOWN_VARIABLES: Final = frozenset({"HOME", "USER", "PWD"})
"""Variables of the environment that a recipe may show; the value of any other may be a key or a password."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unread:
    """A value that cannot be known from what was read, such as a variable that nobody sets."""

    text: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """One setting of another system."""

    key: str
    value: Any
    """A plain value, or `Unread`; text may hold `${...}`."""
    where: str
    """File and line, or the command line."""

    @property
    def text(self) -> str:
        """The setting as one line."""
        return f"{self.key}={self.value.text if isinstance(self.value, Unread) else show(self.value)}"


_INNERMOST = re.compile(r"\$\{([^${}]*)\}")
_MOST_REFERENCES = 100
"""More in one value go in a circle."""
MOST_CHARACTERS = 100_000
"""Longest value with its references replaced: each of those may double it."""
_LARGEST = 1 << 63
"""No number of a setting, nor of a part of one, is as large; products of larger ones may fill any memory."""
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "multiply": lambda first, second: first * second,
    "int_div": lambda first, second: first // second,
    "divide": lambda first, second: first / second,
    "subtract": lambda first, second: first - second,
    "add": lambda first, second: first + second,
    "not": lambda value: not value,
}
"""Functions that RLinf adds to OmegaConf's own."""


def resolve(
    value: Any, key: str, lookup: Callable[[str], Any], variables: Collection[str] | None = SHOWN_VARIABLES
) -> Any:
    """The value of a setting with its references replaced by what `lookup` has for their keys.

    `variables` are those of the environment that `oc.env` may read; None: all. ConfigError for one that it may not
    read, for a function that is not known here, for references in a circle, and for a text that grows too long.
    """
    for _ in range(_MOST_REFERENCES):
        found = _INNERMOST.search(value) if isinstance(value, str) else None
        if found is None:
            return value
        inner = _evaluate(found[1], key, lookup, variables)
        whole = found.span() == (0, len(value))
        value = inner if whole else f"{value[: found.start()]}{inner}{value[found.end() :]}"
        if isinstance(value, str) and len(value) > MOST_CHARACTERS:
            raise ConfigError(
                f"{key}: its references make it longer than {MOST_CHARACTERS:,} characters; write its value"
            )
    raise ConfigError(f"{key}: its references lead in a circle; write its value")


def _evaluate(inner: str, key: str, lookup: Callable[[str], Any], variables: Collection[str] | None) -> Any:
    name, is_call, rest = inner.partition(":")
    if not is_call:
        return lookup(_absolute(inner, key))
    arguments = [part.strip() for part in rest.split(",")]
    if name == "oc.select":
        chosen = lookup(_absolute(arguments[0], key))
        return chosen if chosen is not None or len(arguments) == 1 else read_yaml(arguments[1], key)
    if name == "oc.env":
        return _variable(inner, key, [read_yaml(argument, key) for argument in arguments], variables)
    if name not in _FUNCTIONS:
        raise ConfigError(f"{key}: ${{{name}:...}} is a function that is not known here; write its value")
    numbers = [read_yaml(argument, key) for argument in arguments]
    try:
        if name != "not" and not all(-_LARGEST < number < _LARGEST for number in numbers):
            raise ArithmeticError("larger than any setting")
        return _FUNCTIONS[name](*numbers)
    except (TypeError, ArithmeticError) as error:
        raise ConfigError(f"{key}: ${{{inner}}} has no value ({error}); write its value") from None


def _variable(inner: str, key: str, arguments: Sequence[Any], variables: Collection[str] | None) -> Any:
    """The value of a variable of the environment that may be read, else the default that stands behind its name."""
    name, default = str(arguments[0]), arguments[1:]
    if variables is None or name in variables:
        return os.environ.get(name, *default)
    if not default and name in os.environ:
        raise ConfigError(
            f"{key}: ${{{inner}}} is set in the environment, which a recipe does not show; add {key}=VALUE behind the "
            "file"
        )
    return next(iter(default), None)


def _absolute(reference: str, key: str) -> str:
    """The key that a reference names; one dot at its start is the section of `key`, two the one around that."""
    dots = len(reference) - len(reference.lstrip("."))
    return reference if dots == 0 else ".".join([*key.split(".")[:-dots], reference[dots:]])
