"""Text for users about the types and values of settings."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

GROUP = "group of settings"
"""The type of a section."""


_NAMES = {"integer": "integer", "number": "number", "string": "text", "boolean": "true or false", "null": "null"}
_SIGNS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


def type_text(schema: Mapping[str, Any]) -> str:
    """A JSON schema's type in words for the user: `number > 0 and <= 1`."""
    kind = schema.get("type")
    if "enum" in schema or "const" in schema:
        return one_of(schema.get("enum") or [schema["const"]])
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(type_text, schema["anyOf"])))
    if fixed := schema.get("prefixItems"):
        return f"list of {len(fixed)}, each {type_text(fixed[0])}"
    if "items" in schema:
        return f"list of {type_text(schema['items'])}"
    if kind == "object":
        values = schema.get("additionalProperties")
        keys = type_text(schema.get("propertyNames", {"type": "string"}))
        return f"mapping of {keys} to {type_text(values if isinstance(values, dict) else {})}"
    limits = [(sign, schema[name]) for name, sign in _SIGNS.items() if name in schema]
    # write large integers without an exponent
    bounds = [f" {sign} {limit:g}" if isinstance(limit, float) else f" {sign} {limit}" for sign, limit in limits]
    examples = "".join(f" such as {example}" for example in schema.get("examples", ()))
    return _NAMES.get(str(kind), GROUP) + " and".join(bounds) + examples


def one_of(names: Iterable[object]) -> str:
    return " | ".join(map(str, names))


def show(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def hint(key: str, value: object, allowed: str) -> str:
    """Suggest a correction if the given value shows what was meant."""
    if allowed.startswith(GROUP):
        defaults = "" if allowed == GROUP else f"{key}={{}} takes the defaults, "
        return f"; {defaults}`fovea config {key}` lists them"
    if allowed.startswith("list") and isinstance(value, str):
        return f"; write [{value}]"
    if isinstance(value, bool) and "text" in allowed:
        spelled = "YAML reads yes, no, on and off as true and false; to give a text, write '\"yes\"'"
        return f"; {spelled}"
    if allowed.startswith("text") and isinstance(value, int | float):
        return f"; to give it as text, write '\"{show(value)}\"'"
    digits = value.strip("+-").replace(".", "", 1) if isinstance(value, str) else ""
    if digits.isdigit():
        is_octal = digits.startswith("0") and len(digits) > 1 and "." not in str(value)
        return "; write it without leading zeros" if is_octal else "; without the quotes it is a number"
    return ""
