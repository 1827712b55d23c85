"""Types and values of settings as a user reads them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Annotated, Literal, get_args, get_origin

GROUP = "group of settings"
"""The type of a section."""


@dataclass(frozen=True, slots=True)
class Example:
    """Mark of a type whose values have a form that an example says best."""

    text: str


def type_text(annotation: object, constraints: Sequence[object] = ()) -> str:
    """A type as a user reads it: `number > 0 and <= 1`."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner = [each for extra in parts[1:] for each in getattr(extra, "metadata", [extra])]
        return type_text(parts[0], inner)
    if origin is Literal:
        return one_of(parts)
    if origin is tuple:
        length = "" if parts[-1] is Ellipsis else f"{len(parts)}, each "
        return f"list of {length}{type_text(parts[0])}"
    if origin is dict:
        return f"mapping of {type_text(parts[0])} to {type_text(parts[1])}"
    if parts:
        return " or ".join(dict.fromkeys(map(type_text, parts)))
    names: dict[object, str] = {int: "integer", float: "number", str: "text", bool: "true or false", NoneType: "null"}
    examples = "".join(f" such as {each.text}" for each in constraints if isinstance(each, Example))
    return names.get(annotation, GROUP) + _range_text(constraints) + examples


def _range_text(constraints: Iterable[object]) -> str:
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    found = [(sign, getattr(each, name)) for each in constraints for name, sign in signs.items() if hasattr(each, name)]
    # large integers without an exponent
    bounds = [f"{sign} {limit:g}" if isinstance(limit, float) else f"{sign} {limit}" for sign, limit in found]
    return " " + " and ".join(bounds) if bounds else ""


def one_of(names: Iterable[object]) -> str:
    return " | ".join(map(str, names))


def show(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


_RESUME = {True: "auto", False: "never"}
"""Values of `resume` for a boolean in another system."""


def hint(key: str, value: object, allowed: str) -> str:
    """Suggest a value where the given one shows what was meant."""
    if allowed.startswith(GROUP):
        defaults = "" if allowed == GROUP else f"{key}={{}} takes the defaults, "
        return f"; {defaults}`fovea config {key}` lists them"
    if allowed.startswith("list") and isinstance(value, str):
        return f"; write [{value}]"
    if isinstance(value, bool) and "text" in allowed:
        spelled = "yes, no, on and off are read as true and false, as YAML has them; as text write '\"yes\"'"
        return f"; {f'{show(value)} is resume={_RESUME[value]} here' if key == 'resume' else spelled}"
    if allowed.startswith("text") and isinstance(value, int | float):
        return f"; to give it as text write '\"{show(value)}\"'"
    digits = value.strip("+-").replace(".", "", 1) if isinstance(value, str) else ""
    if digits.isdigit():
        is_octal = digits.startswith("0") and len(digits) > 1 and "." not in str(value)
        return "; write it without the zeros before it" if is_octal else "; without the quotes it is a number"
    return ""
