"""JSON schema of a function's arguments, from its type hints and its docstring.

The schema equals the one of transformers' `get_json_schema`, which chat templates expect.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

SECTIONS = ("Args:", "Returns:", "Raises:")
"""Sections of a docstring in Google's format; the description is the text before the first section."""
SCALARS: Mapping[type, str] = {int: "integer", float: "number", str: "string", bool: "boolean", NoneType: "null"}
PLAIN: Mapping[object, Mapping[str, str]] = {
    **{kind: {"type": name} for kind, name in SCALARS.items()},
    **{kind: {"type": name} for kind, name in ((list, "array"), (tuple, "array"), (dict, "object"))},
    Any: {},
}
_ARGUMENT = re.compile(r"([ \t]*)(\w+):(.*)")
_CHOICES = re.compile(r"\(choices:([^()]*)\)$", re.IGNORECASE)


def function_schema(
    doc: str, hints: Mapping[str, Any], parameters: Sequence[inspect.Parameter]
) -> tuple[str, dict[str, Any]]:
    """Description of a function and the schema of these parameters; ValueError naming what cannot be described."""
    description, described = _sections(doc)
    properties: dict[str, Any] = {}
    for parameter in parameters:
        name = parameter.name
        if name not in described:
            raise ValueError(f"the docstring has no description of {name}")
        schema, text = schema_of(hints[name]), described[name]
        if choices := _CHOICES.search(text):
            schema["enum"] = [each.strip() if isinstance(each, str) else each for each in json.loads(choices[1])]
            text = text[: choices.start()].strip()
        properties[name] = {**schema, "description": text}
    required = [each.name for each in parameters if each.default is each.empty]
    return description, {"type": "object", "properties": properties, **({"required": required} if required else {})}


def schema_of(hint: Any) -> dict[str, Any]:
    """JSON schema of a type; ValueError for a type that has none."""
    origin, arguments = get_origin(hint), get_args(hint)
    if inspect.isclass(hint) and issubclass(hint, Enum):
        return _enumerated([member.value for member in hint], hint)
    if origin is None and hint in PLAIN:
        return dict(PLAIN[hint])
    if origin is Literal:
        return _enumerated(arguments, hint)
    if origin in (Union, UnionType):
        return _union(arguments)
    if origin is dict:
        return {"type": "object", "additionalProperties": schema_of(arguments[1])}
    if origin is list or (origin is tuple and len(arguments) > 1 and ... not in arguments):
        inner = [schema_of(each) for each in arguments]
        return {"type": "array", **({"items": inner[0]} if origin is list else {"prefixItems": inner})}
    raise ValueError(f"the type {hint!r} has no JSON schema")


def _union(arguments: Sequence[Any]) -> dict[str, Any]:
    """Schema of a union: a list of names if all types are plain; None becomes `nullable`, as in transformers."""
    schemas = [schema_of(each) for each in arguments if each is not NoneType]
    names = sorted({each["type"] for each in schemas if each.keys() == {"type"}})
    if len(schemas) == 1:
        schema = schemas[0]
    elif all(each.keys() == {"type"} for each in schemas):
        schema = {"type": names[0] if len(names) == 1 else names}
    else:
        schema = {"anyOf": schemas}
    return {**schema, "nullable": True} if NoneType in arguments else schema


def _enumerated(values: Sequence[Any], hint: object) -> dict[str, Any]:
    if not values or any(type(value) not in SCALARS for value in values):
        raise ValueError(f"the values of {hint!r} are not numbers, texts, booleans or None")
    names = list(dict.fromkeys(SCALARS[type(value)] for value in values))
    return {"type": names[0] if len(names) == 1 else names, "enum": list(values)}


def _sections(doc: str) -> tuple[str, dict[str, str]]:
    """The description in a docstring, and the texts of its arguments by name."""
    sections: dict[str, list[str]] = {"": []}
    title = ""
    for line in doc.strip().splitlines():
        if line.strip() in SECTIONS:
            title = line.strip()
            sections[title] = []
        else:
            sections[title].append(line)
    return "\n".join(sections[""]).strip(), dict(_arguments(sections.get("Args:", [])))


def _arguments(lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Names and texts of arguments; a text continues over lines that are indented deeper, or have no name."""
    name, indent, words = "", 0, list[str]()
    for line in filter(str.strip, lines):
        found = _ARGUMENT.fullmatch(line)
        if found is not None and (not name or len(found[1]) <= indent):
            if name:
                yield name, " ".join(filter(None, words))
            name, indent, words = found[2], len(found[1]), [found[3].strip()]
        else:
            words.append(line.strip())
    if name:
        yield name, " ".join(filter(None, words))
