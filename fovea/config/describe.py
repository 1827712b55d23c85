"""The settings for people, and what to say of a key that is none: where it is now, or which one may be meant."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from typing import Literal, NamedTuple, get_origin

from pydantic.fields import FieldInfo

from fovea.config.recipes import CLOSE_ENOUGH
from fovea.config.run import Config
from fovea.utils.installing import find_tool
from fovea_gym.errors import ConfigError
from fovea_gym.settings.base import (
    MAY_CHANGE,
    NAME,
    Section,
    Tree,
    default_name,
    is_union,
    long_forms,
    names_of,
    sections_of,
    variant_of,
    variants_of,
)
from fovea_gym.settings.type_text import GROUP, one_of, show, type_text
from fovea_gym.utils.entry_points import state


def describe(prefix: str = "") -> list[Setting]:
    """Every key at or below `prefix`, or of a choice such as `environment=geo3k` only; ConfigError where none is."""
    if is_choice(prefix):
        return _describe_choice(prefix)
    _, inner = listed(prefix)
    chosen = [
        setting._replace(doc=f"[{joined(variants)}] {setting.doc}") if variants else setting
        for setting, variants in settings().items()
        if is_at_or_below(setting.key, inner)
    ]
    if not chosen:
        raise ConfigError(unknown_key(prefix))
    return chosen


def is_choice(word: str) -> bool:
    """True for `environment=geo3k` or `environment.name=geo3k`, whatever the name."""
    return "=" in word and _union_at(_key_of_choice(word)) is not None


def _describe_choice(choice: str) -> list[Setting]:
    key, name = _key_of_choice(choice), choice.partition("=")[2]
    field = _union_at(key)
    assert field is not None, choice
    # imports the section of another package, which is among the settings from now on
    if variant_of(field, name) is None:
        raise ConfigError(unknown_name(key, field, name))
    return [setting for setting, variants in settings().items() if f"{key}.{NAME}={name}" in variants]


def _key_of_choice(choice: str) -> str:
    return choice.partition("=")[0].removesuffix(f".{NAME}")


def _union_at(key: str) -> FieldInfo | None:
    """The union at a dotted key, where each union on the way has its default; None where there is none."""
    found = _field_at({}, key)
    return found if found is not None and is_union(found) else None


def unknown_name(key: str, field: FieldInfo, name: object) -> str:
    """The complaint about a name that chooses no section of the union at `key`."""
    allowed = one_of(names_of(field)) or "the name of an installed package's part, and none has one"
    return f"{key}.{NAME}: {show(name)} does not fit; allowed: {allowed}"


def hint_elsewhere(key: str, *ways: Literal["key", "section", "first name", "last name"]) -> str | None:
    """The counterpart of another system's key by the first of these ways; None without one, and without the tools."""
    hint = find_tool("fovea.hints", "elsewhere")
    return None if hint is None else hint(key, ways)


def unknown_key(key: str, choices: Collection[str] = ()) -> str:
    """The complaint about an unknown key, with a near one, but of no member of a union beside the `choices`."""
    part, inner = listed(key)
    if part:
        return f"{part}: {unknown_key(inner, _within(part, choices))}"
    owners: dict[str, list[str]] = {}
    for setting, variants in settings().items():
        owners.setdefault(setting.key, []).extend(variants)
    having = list(dict.fromkeys(each for owner in owners if is_at_or_below(owner, inner) for each in owners[owner]))
    if having:
        return f"{key}: a setting of {joined(having)} only; drop it, or add {having[0]}"
    in_no_section = inner.partition(".")[0] not in Config.model_fields
    hint = hint_elsewhere(key, "key", *(("section", "first name") if in_no_section else ()))
    known = sorted(
        other
        for other in {*owners, *Config.model_fields}
        if not key.startswith(f"{other}.") and not _is_of_another_choice(owners.get(other, ()), choices)
    )
    return hint or _with_near_keys(key, known)


def _within(part: str, choices: Collection[str]) -> set[str]:
    """The choices of a part of a mixture, by the keys of the table."""
    return {choice.removeprefix(f"{part}.") for choice in choices if choice.startswith(part)}


def _is_of_another_choice(variants: Collection[str], choices: Collection[str]) -> bool:
    """True if the members of a union that have a setting are not chosen, and another one is."""
    chosen = {choice.partition("=")[0] for choice in choices}
    return any(each.partition("=")[0] in chosen for each in variants) and not any(each in choices for each in variants)


def _with_near_keys(key: str, known: Sequence[str]) -> str:
    """The complaint about a key, with those that share its last name, or else with the one that is most like it."""
    name = _last(key)
    near = sorted((other for other in known if _last(other) == name), key=lambda other: -_ratio(key, other))
    if not near and (hint := hint_elsewhere(key, "last name")):
        return hint
    if not near:
        likeness = {other: max(_ratio(key, other), _ratio(name, _last(other))) for other in known}
        best = max(known, key=lambda other: (likeness[other], _ratio(key, other)))
        near = [best] if likeness[best] >= CLOSE_ENOUGH else []
    if not near:
        return f"{key}: no such setting; `fovea config` lists them all"
    return f"{key}: no such setting; did you mean {' or '.join(near[:3])}?"


def _field_at(tree: Tree, key: str) -> FieldInfo | None:
    """The field of a dotted key, or of the mapping that it is an entry of, in the sections that a tree chooses."""
    section: type[Section] = Config
    *outer, last = key.split(".")
    for name in outer:
        field = section.field_of(name)
        if field is None or not sections_of(field):
            return field if field is not None and get_origin(field.annotation) is dict else None
        value = long_forms(section, {name: tree.get(name)}).get(name)
        tree = value if isinstance(value, dict) else {}
        name_here = tree.get(NAME, default_name(field))
        chosen = variant_of(field, name_here) if is_union(field) else sections_of(field)[0]
        if chosen is None:
            return None
        section = chosen
    return section.field_of(last)


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _ratio(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def full_key(key: str, value: object) -> str:
    """The key with the only one below it and so on: what the user of `a.b=value` wrote."""
    while isinstance(value, dict) and len(value) == 1:
        (below, value), *_ = value.items()
        key = f"{key}.{below}"
    return key


ANY_PART = "PART"
"""Stands for the name of a part of a mixture in the table."""
_IN_A_PART = re.compile(r"(environment\.parts\.[^.]+)\.(environment\b.*)")
_SENTENCE_END = re.compile(r"(?<=[.!?]) ")
_OF_A_PART = re.compile(r"environment\.parts\.[^.]+")


class Setting(NamedTuple):
    """One key of the tree, for people."""

    key: str
    type: str
    default: str
    doc: str
    may_change: bool
    """True if a resumed run may have another value than it began with."""


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
    choices = _within(part, choices)
    fitting = [
        setting
        for setting, variants in settings().items()
        if is_at_or_below(setting.key, key) and (not variants or any(each in choices for each in variants))
    ]
    if not fitting:
        return allowed_at(key.rpartition(".")[0], choices).rpartition(" to ")[2]
    return next((setting.type for setting in fitting if setting.key == key), GROUP)


def has_setting(choice: str, key: str) -> bool:
    """True if a member of a union, written as its choice (`environment.name=geo3k`), has a setting of this key."""
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
    choices = [f"{choice}: {_first_sentence(inner)}" for choice, inner in variants.items()]
    choices += [f"{choice}: of an installed package." for choice in names_of(field) if choice not in variants]
    only = sections_of(field)[:1] if not variants else ()
    text = " ".join(filter(None, [field.description, *choices])) or _first_sentence(only[0] if only else section)
    return " ".join(text.split())


def _first_sentence(section: type[Section]) -> str:
    return _SENTENCE_END.split(" ".join((section.__doc__ or "").split()))[0]


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
