"""The settings for people, and what to say of a key that is none: where it is now, or which one may be meant."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from fovea.config.elsewhere import hint_for, hint_for_first_name, hint_for_last_name, hint_for_section
from fovea.config.listing import Setting, is_at_or_below, joined, listed, settings
from fovea.config.recipes import CLOSE_ENOUGH, read_yaml
from fovea.config.run import Config
from fovea.errors import ConfigError

OLD_KEYS = Path(__file__).with_name("moved.yaml")


def describe(prefix: str = "") -> list[Setting]:
    """Every key at or below `prefix`, those of all unions and optional sections too; ConfigError for an unknown one."""
    _, inner = listed(prefix)
    chosen = [
        setting._replace(doc=f"[{joined(variants)}] {setting.doc}") if variants else setting
        for setting, variants in settings().items()
        if is_at_or_below(setting.key, inner)
    ]
    if not chosen:
        raise ConfigError(unknown_key(prefix))
    return chosen


def unknown_key(key: str) -> str:
    """The complaint about a key that its section lacks, with the one that may be meant."""
    part, inner = listed(key)
    if part:
        return f"{part}: {unknown_key(inner)}"
    owners: dict[str, list[str]] = {}
    for setting, variants in settings().items():
        owners.setdefault(setting.key, []).extend(variants)
    having = list(dict.fromkeys(each for owner in owners if is_at_or_below(owner, inner) for each in owners[owner]))
    if having:
        return f"{key}: a setting of {joined(having)} only; drop it, or add {having[0]}"
    in_no_section = inner.partition(".")[0] not in Config.model_fields
    told = moved_key(key) or hint_for(key)
    if in_no_section:
        told = told or hint_for_section(key) or hint_for_first_name(key)
    known = sorted(other for other in {*owners, *Config.model_fields} if not key.startswith(f"{other}."))
    return told or _with_near_keys(key, known)


def _with_near_keys(key: str, known: Sequence[str]) -> str:
    """The complaint about a key, with those that share its last name, or else with the one that is most like it."""
    name = _last(key)
    near = sorted((other for other in known if _last(other) == name), key=lambda other: -_ratio(key, other))
    if not near and (told := hint_for_last_name(key)):
        return told
    if not near:
        likeness = {other: max(_ratio(key, other), _ratio(name, _last(other))) for other in known}
        best = max(known, key=lambda other: (likeness[other], _ratio(key, other)))
        near = [best] if likeness[best] >= CLOSE_ENOUGH else []
    if not near:
        return f"{key}: no such setting; `fovea config` lists them all"
    return f"{key}: no such setting; did you mean {' or '.join(near[:3])}?"


def moved_key(key: str) -> str | None:
    """What has become of a setting of an earlier version; None for any other key."""
    old = _old_keys()
    if key in old["dropped"]:
        return f"{key} is no longer set: {old['dropped'][key]}; remove it"
    moved = next((known for known in reversed(old["moved"]) if is_at_or_below(key, known)), None)
    if moved is None:
        return None
    below = key.removeprefix(moved)
    if below and not any(setting.key == f"{old['moved'][moved]}{below}" for setting in settings()):
        return None
    return f"{key} is now {old['moved'][moved]}{below}"


@cache
def _old_keys() -> dict[str, dict[str, str]]:
    """The tables of moved.yaml; a key in a section stands behind that section."""
    tables: dict[str, dict[str, str]] = read_yaml(OLD_KEYS.read_bytes(), str(OLD_KEYS))
    return tables


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
