"""References in OmegaConf values: `${runner.seq_length}`, `${subtract:${a.b}, 1}`, `${oc.select:a.b,512}`."""

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
"""Environment variables that a recipe may show; the value of any other may be a key or a password."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unread:
    """A value that cannot be determined from the text, such as a variable that is never set."""

    text: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """One setting of another system."""

    key: str
    value: Any
    """A plain value, or `Unread`; a text may contain `${...}`."""
    where: str
    """The file and line of the setting, or the command line."""

    @property
    def text(self) -> str:
        """The setting as one line."""
        return f"{self.key}={self.value.text if isinstance(self.value, Unread) else show(self.value)}"


_INNERMOST = re.compile(r"\$\{([^${}]*)\}")
_MOST_REFERENCES = 100
"""Largest number of references to resolve in one value; more are taken for a circle."""
MOST_CHARACTERS = 100_000
"""Longest value after its references are replaced, since each of them may double it."""
_LARGEST = 1 << 63
"""Bound of the numbers in a reference's arithmetic: no setting is as large, and larger products may fill any memory."""
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "multiply": lambda first, second: first * second,
    "int_div": lambda first, second: first // second,
    "divide": lambda first, second: first / second,
    "subtract": lambda first, second: first - second,
    "add": lambda first, second: first + second,
    "not": lambda value: not value,
}
"""Functions that RLinf adds to those of OmegaConf."""


def resolve(
    value: Any, key: str, lookup: Callable[[str], Any], variables: Collection[str] | None = SHOWN_VARIABLES
) -> Any:
    """The value of a setting with its references replaced by the values that `lookup` returns for their keys.

    `variables` are the environment variables that `oc.env` may read; None allows all. Raises ConfigError for a variable
    that it may not read, for an unknown function, for references in a circle, and for a text that grows too long.
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
                f"{key}: with its references replaced it has more than {MOST_CHARACTERS:,} characters; write its value"
            )
    raise ConfigError(f"{key}: its references go in a circle; write its value")


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
        raise ConfigError(f"{key}: ${{{name}:...}} is an unknown function; write its value")
    numbers = [read_yaml(argument, key) for argument in arguments]
    try:
        if name != "not" and not all(-_LARGEST < number < _LARGEST for number in numbers):
            raise ArithmeticError("larger than any setting")
        return _FUNCTIONS[name](*numbers)
    except (TypeError, ArithmeticError) as error:
        raise ConfigError(f"{key}: ${{{inner}}} has no value ({error}); write its value") from None


def _variable(inner: str, key: str, arguments: Sequence[Any], variables: Collection[str] | None) -> Any:
    """The value of a readable environment variable, else the default that follows its name."""
    name, default = str(arguments[0]), arguments[1:]
    if variables is None or name in variables:
        return os.environ.get(name, *default)
    if not default and name in os.environ:
        raise ConfigError(
            f"{key}: ${{{inner}}} is set in the environment, and a recipe must not show it; add {key}=VALUE after the "
            "file"
        )
    return next(iter(default), None)


def _absolute(reference: str, key: str) -> str:
    """The key that a reference names; one leading dot is the section of `key`, two are the section around it."""
    dots = len(reference) - len(reference.lstrip("."))
    return reference if dots == 0 else ".".join([*key.split(".")[:-dots], reference[dots:]])
