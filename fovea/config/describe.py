"""The settings as text for people, and error texts for unknown keys with the key that may be meant."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from typing import Literal, NamedTuple

from pydantic.fields import FieldInfo

from fovea.config.recipes import CLOSE_ENOUGH
from fovea.config.run import Config
from fovea.config.schema import ALIAS_KEY, DISCRIMINATOR_KEY, recipe_schema
from fovea.utils.installing import find_tool
from fovea_gym.errors import ConfigError
from fovea_gym.settings.base import (
    MAY_CHANGE,
    NAME,
    Section,
    Tree,
    file_meant,
    is_union,
    names_of,
    sections_of,
    variant_of,
)
from fovea_gym.settings.type_text import GROUP, one_of, show, type_text
from fovea_gym.utils.entry_points import state


def describe(prefix: str = "") -> list[Setting]:
    """Every setting at or below `prefix`, or of a choice such as `environment=geo3k`; ConfigError if there is none."""
    key, name = _choice(prefix)
    if "=" in prefix and (field := _union_at(key)) is not None:
        # this imports a section of another package, which is then among the settings
        if variant_of(field, name) is None:
            raise ConfigError(unknown_name(key, field, name))
        return [setting for setting, variants in settings().items() if f"{key}.{NAME}={name}" in variants]
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
    """True for a choice such as `environment=geo3k` or `environment.name=geo3k`, with any name."""
    return "=" in word and _union_at(_choice(word)[0]) is not None


def _choice(word: str) -> tuple[str, str]:
    key, _, name = word.partition("=")
    return key.removesuffix(f".{NAME}"), name


def _union_at(key: str) -> FieldInfo | None:
    """The union at a dotted key, if every union on the way has its default; None if there is no union."""
    sections: Sequence[type[Section]] = (Config,)
    field = None
    for name in key.split("."):
        field = sections[0].field_of(name) if sections else None
        sections = () if field is None else sections_of(field)
    return field if field is not None and is_union(field) else None


def unknown_name(key: str, field: FieldInfo, name: object) -> str:
    """Error text for a name that chooses no section of the union at `key`."""
    allowed = one_of(names_of(field)) or "names that installed packages register (there are none)"
    meant = file_meant(str(name)) if "own" in names_of(field) else None
    fix = f"; for your class in that file write {meant}" if meant else ""
    return f"{key}.{NAME}: {show(name)} does not fit; allowed: {allowed}{fix}"


def hint_elsewhere(key: str, *ways: Literal["key", "section", "first name", "last name"]) -> str | None:
    """The counterpart of another system's key by the first of these ways that finds one; None without fovea-tools."""
    hint = find_tool("fovea.hints", "elsewhere")
    return None if hint is None else hint(key, ways)


def unknown_key(key: str, choices: Collection[str] = ()) -> str:
    """Error text for an unknown key, with similar keys, except those of union members that `choices` excludes."""
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
    """The choices within a part of a mixture, under the keys of the settings table."""
    return {choice.removeprefix(f"{part}.") for choice in choices if choice.startswith(part)}


def _is_of_another_choice(variants: Collection[str], choices: Collection[str]) -> bool:
    """True if a setting belongs to members of a union that are not chosen, while another member is."""
    chosen = {choice.partition("=")[0] for choice in choices}
    return any(each.partition("=")[0] in chosen for each in variants) and not any(each in choices for each in variants)


def _with_near_keys(key: str, known: Sequence[str]) -> str:
    """Error text for a key, with the keys that share its last name, or else with the most similar key."""
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


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _ratio(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def full_key(key: str, value: object) -> str:
    """Join a key with its only key below, and so on: the dotted key in the user's `a.b=value`."""
    while isinstance(value, dict) and len(value) == 1:
        (below, value), *_ = value.items()
        key = f"{key}.{below}"
    return key


ANY_PART = "PART"
"""Placeholder for the name of a mixture's part in the settings table."""
_IN_A_PART = re.compile(r"(environment\.parts\.[^.]+)\.(environment\b.*)")
_SENTENCE_END = re.compile(r"(?<=[.!?]) ")
_OF_A_PART = re.compile(r"environment\.parts\.[^.]+")


class Setting(NamedTuple):
    """One setting as text for people."""

    key: str
    type: str
    default: str
    doc: str
    may_change: bool
    """True if a resumed run may change the value."""


def listed(key: str) -> tuple[str, str]:
    """The part of a mixture that a key is in ("" for none), and the key under which the settings table lists it."""
    if found := _IN_A_PART.fullmatch(key):
        return found[1], found[2]
    return "", _OF_A_PART.sub(f"environment.parts.{ANY_PART}", key)


def allowed_at(key: str, choices: Collection[str]) -> str:
    """The type, as text, of a setting, a section or an entry of a mapping, given the chosen members of unions."""
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
    """True if a member of a union, written as its choice (`environment.name=geo3k`), has a setting with this key."""
    (part, inner), key = listed(choice), listed(key)[1]
    return any(
        setting.key == key and (not variants or (inner if part else choice) in variants)
        for setting, variants in settings().items()
    )


def settings() -> dict[Setting, list[str]]:
    """Every setting, with the union members that have it unless all do; those from packages only once imported."""
    return _settings(state())


@cache
def _settings(_state: object) -> dict[Setting, list[str]]:
    found: dict[Setting, list[str]] = {}
    schema = recipe_schema()
    for variant, setting in _walk(schema, schema["$defs"]):
        found.setdefault(setting, []).extend([variant] if variant else [])
    return found


def _walk(
    section: Tree, sections: Tree, path: str = "", variant: str = "", may: bool = False
) -> Iterator[tuple[str, Setting]]:
    """Every setting at or below a section, with the choice (`environment.name=geo3k`) that it depends on."""
    entry = section["additionalProperties"]
    for name, node in {**section["properties"], **({ANY_PART: entry} if entry else {})}.items():
        if name == NAME and variant:
            continue
        key, may_change = f"{path}{name}", may or node.get(MAY_CHANGE, False)
        forms = node.get("anyOf", [node])
        inside = [sections[each["$ref"].rpartition("/")[2]] for each in forms if "$ref" in each]
        doc = " ".join(_doc(section, node, inside).split())
        default = node.get("default", "unset" if ALIAS_KEY in node else "must be set")
        if listed(key)[0]:
            yield variant, Setting(key, GROUP, "environment.name=shapes", node.get("description", ""), may_change)
            continue
        if DISCRIMINATOR_KEY in node:
            choices = type_text(forms[len(inside)])
            chosen = "null" if default is None else choices.partition(" ")[0]
            yield "", Setting(f"{key}.{NAME}", choices, chosen, doc, may_change)
        elif inside and default is None:
            yield variant, Setting(key, f"{GROUP} or null", "null", doc, may_change)
        elif not inside:
            shown = default if isinstance(default, str) and default else json.dumps(default)
            yield variant, Setting(key, type_text(node), shown, doc, may_change)
        for inner in inside:
            choice = f"{key}.{NAME}={inner['properties'][NAME]['const']}" if DISCRIMINATOR_KEY in node else variant
            yield from _walk(inner, sections, f"{key}.", choice, may_change)


def _doc(section: Tree, node: Tree, inside: Sequence[Tree]) -> str:
    """The description of a node, for a union with its members'; or else that of its section or the enclosing one."""
    if DISCRIMINATOR_KEY not in node:
        return node.get("description") or _first_sentence(inside[0] if inside else section)
    docs = {each["properties"][NAME]["const"]: _first_sentence(each) for each in inside}
    names = node["anyOf"][len(inside)].get("enum", ())
    choices = [f"{name}: {docs.get(name, 'of an installed package.')}" for name in names]
    return " ".join(filter(None, [node.get("description"), *choices])) or _first_sentence(section)


def _first_sentence(section: Tree) -> str:
    return _SENTENCE_END.split(" ".join(section.get("description", "").split()))[0]


def joined(variants: list[str]) -> str:
    """Join choices of one union, as in `environment.name=geo3k | vqa`."""
    return f"{variants[0].partition('=')[0]}={one_of(variant.partition('=')[2] for variant in variants)}"


def is_at_or_below(key: str, prefix: str) -> bool:
    return not prefix or f"{key}.".startswith(f"{prefix}.")
