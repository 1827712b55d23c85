"""A Python function as a tool; its JSON schema comes from its signature and docstring."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias, get_args, get_origin, get_type_hints

from PIL import Image

from fovea_gym.errors import ConfigError, first_line, result_or_error
from fovea_gym.tools.base import PICTURE_NUMBER, Picture, ToolError
from fovea_gym.tools.results import as_parts
from fovea_gym.tools.schema import function_schema
from fovea_gym.types import ImageRef, ToolSpec

Given: TypeAlias = Literal["one", "all"]
"""The pictures that a parameter gets: one that the model chooses, or all pictures of the conversation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionTool:
    """A user function as a tool."""

    function: Callable[..., Any]
    spec: ToolSpec
    pictures: Mapping[str, Given]
    """The parameters that get pictures, and which ones."""

    async def call(self, arguments: Mapping[str, object], pictures: Sequence[Picture]) -> Sequence[str | ImageRef]:
        call = partial(self._called, arguments, pictures)
        # in a thread, since a function may block; errors of any type are returned, even SystemExit
        result, error = await asyncio.to_thread(result_or_error, call)
        if error is None and inspect.isawaitable(result):
            result = await result
        if error is not None:
            raise error if isinstance(error, Exception) else ToolError(f"{self.spec.name} raised {first_line(error)}")
        return as_parts(result, self.spec.name)

    def _called(self, arguments: Mapping[str, object], pictures: Sequence[Picture]) -> object:
        given: dict[str, object] = {name: arguments[name] for name in arguments.keys() - self.pictures.keys()}
        for name, which in self.pictures.items():
            number: Any = arguments.get(name, 1)
            if which == "one" and not 1 <= number <= len(pictures):
                raise ToolError(f"there is no picture {number}; the conversation has {len(pictures)}, numbered from 1")
            given[name] = [each.opened() for each in pictures] if which == "all" else pictures[number - 1].opened()
        return self.function(**given)


def function_tool(function: object, shown: str) -> FunctionTool:
    """Make a tool of a function; ConfigError beginning with `shown` if it cannot be described to the model."""
    if not callable(function):
        raise ConfigError(f"{shown} is of type {type(function).__name__}; name a function or a tool")
    name = getattr(function, "__name__", type(function).__name__)
    if not name.isidentifier():
        raise ConfigError(f"{shown} has no name ({name}); write it as def NAME(...)")
    if not inspect.getdoc(function):
        raise ConfigError(
            f"{shown} has no docstring, which the model needs as its description; describe there what it does, "
            "and below `Args:` what each argument is"
        )
    hints, parameters = _parameters(function, shown)
    pictures = {each: which for each in parameters if (which := _pictures_of(hints[each])) is not None}
    description, schema = _schema(
        function, hints, [parameters[each] for each in parameters if each not in pictures], shown
    )
    numbers = {each: PICTURE_NUMBER for each, which in pictures.items() if which == "one"}
    spec = ToolSpec(
        name=name, description=description, parameters={**schema, "properties": {**schema["properties"], **numbers}}
    )
    return FunctionTool(function=function, spec=spec, pictures=pictures)


def _parameters(function: Callable[..., Any], shown: str) -> tuple[dict[str, Any], dict[str, inspect.Parameter]]:
    """Types and parameters of a function, by name; ConfigError for a parameter without a type, or for `*args`."""
    parameters = dict(inspect.signature(function).parameters)
    typed: Any = function if inspect.isroutine(function) else type(function).__call__
    try:
        hints = get_type_hints(typed)
    except (NameError, TypeError) as error:
        raise ConfigError(f"{shown} has a type that cannot be read ({first_line(error)}); fix it") from error
    for name, parameter in parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(f"{shown} takes {parameter}; give every argument a separate name")
        if name not in hints:
            raise ConfigError(f"{shown} has no type for {name}; annotate it, such as {name}: float")
    return hints, parameters


def _pictures_of(hint: object) -> Given | None:
    if hint is Image.Image:
        return "one"
    return "all" if get_origin(hint) in (list, Sequence) and get_args(hint) == (Image.Image,) else None


def _schema(
    function: Callable[..., Any], hints: Mapping[str, Any], parameters: Sequence[inspect.Parameter], shown: str
) -> tuple[str, dict[str, Any]]:
    """Description and schema of a function without its picture parameters; ConfigError if that is impossible."""
    try:
        return function_schema(inspect.getdoc(function) or "", hints, parameters)
    except ValueError as error:
        raise ConfigError(
            f"{shown} cannot be described to the model ({first_line(error)}); use str, int, float, "
            "bool, list, dict, Literal or PIL.Image.Image as types, and describe every argument below `Args:`"
        ) from error
