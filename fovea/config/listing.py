"""The table of all settings: every key with its type, default and help text."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from functools import cache
from typing import NamedTuple

from pydantic.fields import FieldInfo

from fovea.config.base import MAY_CHANGE, NAME, Section, is_union, names_of, sections_of, variants_of
from fovea.config.run import Config
from fovea.config.type_text import GROUP, one_of, type_text
from fovea.utils.entry_points import state

ANY_PART = "PART"
"""Stands for the name of a part of a mixture in the table."""
_IN_A_PART = re.compile(r"(environment\.parts\.[^.]+)\.(environment\b.*)")
_OF_A_PART = re.compile(r"environment\.parts\.[^.]+")


class Setting(NamedTuple):
    """One key of the tree, for people."""

    key: str
    type: str
    default: str
    doc: str
    may_change: bool
    """Whether a resumed run may have another value than it began with."""


def listed(key: str) -> tuple[str, str]:
    """The part of a mixture that a key is in, "" for none, and the key by which the table has it.

    The environment of a part has the settings of any run's, which the table has once.
    """
    if found := _IN_A_PART.fullmatch(key):
        return found[1], found[2]
    return "", _OF_A_PART.sub(f"environment.parts.{ANY_PART}", key)


def allowed_at(key: str, choices: Collection[str]) -> str:
    """The type of a setting, of a section, or of an entry of a mapping, where these members of unions are chosen."""
    part, key = listed(key)
    choices = {choice.removeprefix(f"{part}.") for choice in choices if choice.startswith(part)}
    fitting = [
        setting
        for setting, variants in settings().items()
        if is_at_or_below(setting.key, key) and (not variants or any(each in choices for each in variants))
    ]
    if not fitting:
        return allowed_at(key.rpartition(".")[0], choices).rpartition(" to ")[2]
    return next((setting.type for setting in fitting if setting.key == key), GROUP)


def has_setting(choice: str, key: str) -> bool:
    """Whether a member of a union, written as its choice (`environment.name=geo3k`), has a setting of this key."""
    (part, inner), key = listed(choice), listed(key)[1]
    return any(
        setting.key == key and (not variants or (inner if part else choice) in variants)
        for setting, variants in settings().items()
    )


def settings() -> dict[Setting, list[str]]:
    """Every setting, with the members of a union that have it where not all do: some share a setting.

    The members of other packages are among them once they have been imported.
    """
    return _settings(state())


@cache
def _settings(_state: object) -> dict[Setting, list[str]]:
    found: dict[Setting, list[str]] = {}
    for variant, setting in _walk(Config, ""):
        found.setdefault(setting, []).extend([variant] if variant else [])
    return found


def _walk(section: type[Section], path: str, variant: str = "", may: bool = False) -> Iterator[tuple[str, Setting]]:
    """Every setting at or below a section, with the choice (`environment.name=geo3k`) that it depends on."""
    entries = {ANY_PART: section.entry} if section.entry else {}
    for name, field in {**section.model_fields, **entries}.items():
        if name == NAME and variant:
            continue
        key, doc, may_change = f"{path}{name}", _doc(section, field), may or MAY_CHANGE in field.metadata
        if listed(key)[0]:
            yield variant, Setting(key, GROUP, "environment.name=shapes", field.description or "", may_change)
            continue
        sections, variants = sections_of(field), variants_of(field)
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        if is_union(field):
            chosen = "null" if default is None else getattr(default, NAME)
            yield "", Setting(f"{key}.{NAME}", one_of(names_of(field)) or "text", chosen, doc, may_change)
        elif sections and default is None and not field.is_required():
            yield variant, Setting(key, type_text(field.annotation), "null", doc, may_change)
        elif not sections:
            type_ = type_text(field.annotation, field.metadata)
            yield variant, Setting(key, type_, _default_text(field), doc, may_change)
        for inner in variants.values() if is_union(field) else sections:
            choice = f"{key}.{NAME}={inner.model_fields[NAME].default}" if variants else variant
            yield from _walk(inner, f"{key}.", choice, may_change)
    for alias, names in section.aliases.items():
        first = section.model_fields[names[0]]
        type_, doc = type_text(first.annotation, first.metadata), f"Sets {' and '.join(names)}."
        yield variant, Setting(f"{path}{alias}", type_, "unset", doc, may)


def _doc(section: type[Section], field: FieldInfo) -> str:
    variants = variants_of(field)
    choices = [f"{choice}: {_first_line(inner)}" for choice, inner in variants.items()]
    choices += [f"{choice}: of another package." for choice in names_of(field) if choice not in variants]
    only = sections_of(field)[:1] if not variants else ()
    text = " ".join(filter(None, [field.description, *choices])) or _first_line(only[0] if only else section)
    return " ".join(text.split())


def _first_line(section: type[Section]) -> str:
    return (section.__doc__ or "").strip().split("\n")[0]


def _default_text(field: FieldInfo) -> str:
    if field.is_required():
        return "must be set"
    default = field.get_default(call_default_factory=True)
    return default if isinstance(default, str) and default else json.dumps(default)


def joined(variants: list[str]) -> str:
    """`environment.name=geo3k | vqa`."""
    return f"{variants[0].partition('=')[0]}={one_of(variant.partition('=')[2] for variant in variants)}"


def is_at_or_below(key: str, prefix: str) -> bool:
    return not prefix or f"{key}.".startswith(f"{prefix}.")
