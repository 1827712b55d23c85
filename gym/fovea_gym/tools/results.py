"""Checks of tool calls: arguments must fit the schema, and results must fit in a message within limits."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fovea_gym.errors import BadRowError
from fovea_gym.rows.images import OpenImage, is_url
from fovea_gym.tools.base import BadResultError, ToolError
from fovea_gym.types import ImageRef, ToolSpec

MAX_CHARACTERS = 8_000
"""Maximum characters of a result; a longer result is cut, with a note."""
MAX_PICTURES = 8
MAX_MEGAPIXELS = 16.0
KINDS = "a text, a number, a dict, a picture (Pillow, uint8 values of numpy, ImageRef) or a list of these"
_TYPES: Mapping[str, tuple[type, ...]] = {
    **{"string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,)},
    **{"array": (list,), "object": (dict,), "null": (type(None),)},
}
"""Python types by their names in JSON schema."""
_SHOWN_CHARACTERS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultLimits:
    """Settings for the checks of pictures that tools return."""

    open_image: OpenImage
    image_root: str | None = None
    """Folder that must contain pictures returned as paths; None: tools may not return paths."""
    section: str = ""
    """Prefix of `image_root` in errors: `data.` if a recipe sets it."""


def as_parts(result: object, tool: str) -> list[str | ImageRef]:
    """The texts and pictures of a result; BadResultError for an unsupported object."""
    match result:
        case str() | ImageRef():
            return [result]
        case Image.Image() | np.ndarray():
            return [ImageRef(source=result, where=f"a picture of {tool}")]
        case Mapping() | int() | float() | np.generic():
            return [_json(result, tool)]
        case Sequence() if not isinstance(result, bytes):
            plain = _is_plain(result)
            return [_json(result, tool)] if plain else [part for each in result for part in as_parts(each, tool)]
    raise BadResultError(f"{tool} returned an object of type {type(result).__name__}; a tool returns {KINDS}")


def checked_parts(parts: Sequence[str | ImageRef], tool: str, limits: ResultLimits) -> list[str | ImageRef]:
    """The parts with decoded pictures and texts cut to the limit; BadResultError for a picture that cannot be shown."""
    pictures = sum(isinstance(part, ImageRef) for part in parts)
    if pictures > MAX_PICTURES:
        raise BadResultError(f"{tool} returned {pictures} pictures; the limit is {MAX_PICTURES}")
    left, found = MAX_CHARACTERS, list[str | ImageRef]()
    for part in parts:
        if isinstance(part, ImageRef):
            found.append(_opened(part, tool, limits))
            continue
        found.append(part if len(part) <= left else f"{part[:left]}... ({len(part) - left} more characters)")
        left = max(0, left - len(part))
    return found or [""]


def _opened(ref: ImageRef, tool: str, limits: ResultLimits) -> ImageRef:
    """The picture decoded in memory, so that no later step can fail to open it."""
    _check_place(ref.source, tool, limits)
    _check_size(ref.source, tool)
    try:
        image = limits.open_image(ref)
    except BadRowError as error:
        # leave out the error's fix, which is about rows
        raise BadResultError(f"{tool} returned a picture that cannot be shown: {error.problem}") from error
    _check_size(image, tool)
    return ImageRef(source=image, where=ref.where)


def _check_place(source: object, tool: str, limits: ResultLimits) -> None:
    if not isinstance(source, str):
        return
    image_root, setting = limits.image_root, f"{limits.section}image_root"
    has_place = image_root is not None and not is_url(source)
    if not (has_place and Path(source).resolve().is_relative_to(Path(str(image_root)).resolve())):
        place = setting if image_root is None else f"{setting}={image_root}"
        raise BadResultError(
            f"{tool} returned the path {source:.200}, which is not inside {place}; return the picture itself"
        )


def _check_size(source: object, tool: str) -> None:
    if isinstance(source, Image.Image):
        width, height = source.size
    elif isinstance(source, np.ndarray) and source.ndim >= 2:
        height, width = source.shape[:2]
    else:
        return
    if width * height / 1e6 > MAX_MEGAPIXELS:
        raise BadResultError(
            f"{tool} returned a picture of {width}x{height} pixels; the limit is {MAX_MEGAPIXELS:g} megapixels"
        )


def _is_plain(values: Sequence[object]) -> bool:
    """True for a list of numbers, or of lists of numbers, which is written as one text."""
    return all(
        isinstance(each, int | float | np.number) or (isinstance(each, list | tuple) and _is_plain(each))
        for each in values
    )


def _json(result: object, tool: str) -> str:
    try:
        return json.dumps(result, ensure_ascii=False, default=_plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadResultError(
            f"{tool} returned a value that is not JSON ({error!s:.100}); a tool returns {KINDS}"
        ) from error


def _plain(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.size < MAX_CHARACTERS:
        return value.tolist()
    raise TypeError(f"{type(value).__name__} in it")


def check_arguments(arguments: Mapping[str, object], tool: ToolSpec) -> dict[str, object]:
    """The arguments, with whole floats as integers if the schema wants these; ToolError for one that does not fit."""
    properties: Any = tool.parameters.get("properties", {})
    required: Any = tool.parameters.get("required", ())
    known = ", ".join(properties) or "none"
    for name in required:
        if name not in arguments:
            raise ToolError(f"{tool.name} needs the argument {name}; its arguments are {known}")
    for name in arguments:
        if name not in properties:
            raise ToolError(f"{tool.name} has no argument {name:.{_SHOWN_CHARACTERS}}; its arguments are {known}")
    return {name: _checked(value, properties[name], name) for name, value in arguments.items()}


def _checked(value: Any, schema: Mapping[str, Any], name: str) -> object:
    types = _types(schema)
    if isinstance(value, float) and value.is_integer() and "integer" in types and "number" not in types:
        value = int(value)
    if types and not any(_is_of(value, each) for each in types):
        raise ToolError(f"{name} is {_shown(value)}; give {' or '.join(sorted(types))}")
    if "enum" in schema and value not in schema["enum"] and value is not None:
        raise ToolError(f"{name} is {_shown(value)}; give one of {', '.join(map(str, schema['enum']))}")
    if isinstance(value, list):
        return _checked_items(value, schema, name)
    if _is_of(value, "number"):
        low, high = schema.get("minimum", value), schema.get("maximum", value)
        if not low <= value <= high:
            raise ToolError(f"{name} is {value:g}; give a number from {low:g} to {high:g}")
    return value


def _checked_items(values: list[Any], schema: Mapping[str, Any], name: str) -> list[object]:
    fewest, most = schema.get("minItems", 0), schema.get("maxItems", len(values))
    if not fewest <= len(values) <= most:
        wanted = str(fewest) if fewest == most else f"{fewest} to {most}"
        raise ToolError(f"{name} has {len(values)} entries; give {wanted}")
    items = schema.get("items", {})
    return [_checked(value, items, f"{name}[{place}]") for place, value in enumerate(values)]


def _types(schema: Mapping[str, Any]) -> set[str]:
    """The types that a schema allows; empty if it allows any type."""
    if "anyOf" in schema or "$ref" in schema:
        return set()
    listed = schema.get("type", ())
    types = {listed} if isinstance(listed, str) else set(listed)
    return (types | {"null"} if schema.get("nullable") else types) if types <= _TYPES.keys() else set()


def _is_of(value: object, kind: str) -> bool:
    # True is an int in Python, but not a number in JSON
    return isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))


def _shown(value: object) -> str:
    shown = " ".join(repr(value).split())
    return shown if len(shown) <= _SHOWN_CHARACTERS else f"{shown[: _SHOWN_CHARACTERS - 3]}..."
