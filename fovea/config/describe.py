"""The settings for people: every key with its type, default and text, and what to say of one that is wrong."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Sequence
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, get_args, get_origin

from pydantic.fields import FieldInfo

from fovea.config.run import Config, Section
from fovea.errors import ConfigError

Tree: TypeAlias = dict[str, Any]
"""What YAML gives: nested mappings of plain values."""

CLOSE_ENOUGH = 0.7
"""Likeness (difflib) of a near match; at its usual 0.6 `lr` would be `model.lora`."""


class Setting(NamedTuple):
    """One key of the tree, for people."""

    key: str
    type: str
    default: str
    doc: str


def describe(prefix: str = "") -> list[Setting]:
    """Every key at or below `prefix`, those of all variants and optional sections too."""
    chosen = [
        setting._replace(doc=f"[{_joined(variants)}] {setting.doc}") if variants else setting
        for setting, variants in _settings().items()
        if is_at_or_below(setting.key, prefix)
    ]
    if not chosen:
        raise ConfigError(unknown_key(prefix))
    return chosen


def unknown_key(key: str) -> str:
    """What is wrong with a key that its section lacks, and which one may be meant."""
    owners = {setting.key: variants for setting, variants in _settings().items()}
    if key in owners:
        return f"{key}: a setting of {_joined(owners[key])} only; drop it, or add {owners[key][0]}"
    known = sorted(other for other in {*owners, *Config.model_fields} if not key.startswith(f"{other}."))
    name = _last(key)
    near = sorted((other for other in known if _last(other) == name), key=lambda other: -_ratio(key, other))
    if not near:
        likeness = {other: max(_ratio(key, other), _ratio(name, _last(other))) for other in known}
        best = max(known, key=lambda other: (likeness[other], _ratio(key, other)))
        near = [best] if likeness[best] >= CLOSE_ENOUGH else []
    if not near:
        return f"{key}: no such setting; `fovea config` lists them all"
    return f"{key}: no such setting; did you mean {' or '.join(near[:3])}?"


def _settings() -> dict[Setting, list[str]]:
    """Every setting, with the variants that have it where not all do: some share a setting."""
    found: dict[Setting, list[str]] = {}
    for variant, setting in _walk(Config, ""):
        found.setdefault(setting, []).extend([variant] if variant else [])
    return found


def _joined(variants: Sequence[str]) -> str:
    """`environment.name=geo3k | vqa`."""
    tag = variants[0].partition("=")[0]
    return f"{tag}={' | '.join(variant.partition('=')[2] for variant in variants)}"


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _ratio(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def is_at_or_below(key: str, prefix: str) -> bool:
    return not prefix or f"{key}.".startswith(f"{prefix}.")


def sections_of(field: FieldInfo) -> tuple[type[Section], ...]:
    """The sections that a field may hold: one, one per variant, or none (a plain setting)."""
    return tuple(_sections_in(field.annotation))


def _sections_in(annotation: object) -> Iterator[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for part in get_args(annotation):
        yield from _sections_in(part)


def variants_of(field: FieldInfo) -> dict[str, type[Section]]:
    """The sections of a field that has several, by the name which chooses them."""
    tag = field.discriminator
    if not isinstance(tag, str):
        return {}
    return {section.model_fields[tag].default: section for section in sections_of(field)}


def section_of(field: FieldInfo, value: Tree) -> type[Section]:
    variants = variants_of(field)
    return variants[value[str(field.discriminator)]] if variants else sections_of(field)[0]


def _walk(section: type[Section], path: str, variant: str = "") -> Iterator[tuple[str, Setting]]:
    """Every setting at or below a section, with the variant (`environment.name=geo3k`) that has it."""
    for name, field in section.model_fields.items():
        key, doc, variants = f"{path}{name}", _doc(section, field), variants_of(field)
        if variants:
            tag = f"{key}.{field.discriminator}"
            default = getattr(field.get_default(call_default_factory=True), str(field.discriminator))
            doc = " ".join(f"{choice}: {_first_line(inner)}" for choice, inner in variants.items())
            yield "", Setting(tag, one_of(variants), default, doc)
            for choice, inner in variants.items():
                below = _walk(inner, f"{key}.", f"{tag}={choice}")
                yield from (pair for pair in below if pair[1].key != tag)
        elif sections_of(field):
            if not field.is_required() and field.default is None:
                yield variant, Setting(key, type_text(field.annotation, field.metadata), "null", doc)
            yield from _walk(sections_of(field)[0], f"{key}.", variant)
        else:
            text = type_text(field.annotation, field.metadata)
            yield variant, Setting(key, text, _default_text(field), doc)


def _doc(section: type[Section], field: FieldInfo) -> str:
    inner = sections_of(field)
    return field.description or _first_line(inner[0] if inner else section)


def _first_line(section: type[Section]) -> str:
    return (section.__doc__ or "").strip().split("\n")[0]


def _default_text(field: FieldInfo) -> str:
    if field.is_required():
        return "must be set"
    default = field.get_default(call_default_factory=True)
    return default if isinstance(default, str) and default else json.dumps(default)


def type_text(annotation: object, constraints: Iterable[object] = ()) -> str:
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
    return _name_of_type(annotation) + _range_text(constraints)


def _name_of_type(annotation: object) -> str:
    names: dict[object, str] = {int: "integer", float: "number", str: "text", bool: "true or false"}
    names |= {NoneType: "null"} | dict.fromkeys(_sections_in(annotation), "group of settings")
    return names[annotation]


def _range_text(constraints: Iterable[object]) -> str:
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    bounds = [
        f"{sign} {_limit(getattr(each, name))}"
        for each in constraints
        for name, sign in signs.items()
        if hasattr(each, name)
    ]
    return " " + " and ".join(bounds) if bounds else ""


def _limit(limit: object) -> str:
    """A bound of a range, without the exponent of a large integer."""
    return f"{limit:g}" if isinstance(limit, float) else str(limit)


def one_of(names: Iterable[object]) -> str:
    return " | ".join(map(str, names))


def show(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def hint(key: str, value: object, allowed: str) -> str:
    """What to write instead, where the value tells what was meant."""
    if allowed == "group of settings":
        return f"; `fovea config {key}` lists them"
    if allowed.startswith("group of settings"):
        return f"; {key}={{}} takes the defaults, `fovea config {key}` lists them"
    if allowed.startswith("list") and isinstance(value, str):
        return f"; write [{value}]"
    if allowed.startswith("text") and isinstance(value, bool | int | float):
        return f"; to give it as text write '\"{show(value)}\"'"
    if isinstance(value, str) and value.strip("+-").replace(".", "", 1).isdigit():
        return "; without the quotes it is a number"
    return ""
