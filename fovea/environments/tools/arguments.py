"""Arguments of a call against the JSON schema of its tool: the keywords that signatures of Python functions give."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fovea.environments.tools.base import ToolError
from fovea.types import ToolSpec

_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}
_SHOWN_CHARACTERS = 60


def check_arguments(arguments: Mapping[str, object], tool: ToolSpec) -> dict[str, object]:
    """The arguments, whole numbers as integers where the schema says so; ToolError for one that does not fit.

    Keywords of JSON schema that are not known here are left to the tool.
    """
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
    """The types that a schema allows; empty: any."""
    if "anyOf" in schema or "$ref" in schema:
        return set()
    listed = schema.get("type", ())
    types = {listed} if isinstance(listed, str) else set(listed)
    return (types | {"null"} if schema.get("nullable") else types) if types <= _TYPES.keys() else set()


def _is_of(value: object, kind: str) -> bool:
    # True is an int in Python, and no number in JSON
    return isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))


def _shown(value: object) -> str:
    shown = " ".join(repr(value).split())
    return shown if len(shown) <= _SHOWN_CHARACTERS else f"{shown[: _SHOWN_CHARACTERS - 3]}..."
