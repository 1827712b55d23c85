"""Settings, commands and metrics of other systems with their counterparts here, as listed in elsewhere.yaml."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from fovea.config.recipes import read_yaml

FILE = Path(__file__).with_suffix(".yaml")
BELOW = ".*"
"""Suffix of a key that stands for all keys below it."""
GENERIC_NAMES = frozenset({"device", "enable", "len", "metric", "mode", "name", "path", "strategy", "tool", "type"})
"""Last names of keys that are too general to show which setting is meant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counterpart:
    """One setting of another system: the keys that it sets here, or the reason why it has none."""

    theirs: str
    """Its key; with the suffix `.*`, all keys below it."""
    ours: tuple[str, ...] = ()
    """The keys here: each of them gets its value, or, if there is a rule, may be set by the rule."""
    has_default: bool = False
    default: Any = None
    """Its default value, if `has_default`."""
    values: Mapping[Any, Any] | None = None
    """Its values, and our value for each; other values have no counterpart."""
    special: Mapping[Any, Any] | None = None
    """Values that differ here, and ours for each; other values are the same."""
    type: str = ""
    """Type that its value must have, such as `text or null`; empty for any type, which is checked later."""
    when: Mapping[str, Any] = field(default_factory=dict)
    """Another of the system's keys, and the value with which this one takes effect; empty: always."""
    rule: str = ""
    """Name of the importer's function that reads it together with others, or converts its unit."""
    none: str = ""
    """Reason why it has no counterpart."""
    harmless: tuple[Any, ...] | Literal["any"] = ()
    """Values that have no counterpart and can be dropped without effect."""
    note: str = ""
    """Description of the difference between the two settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A command or a metric of another system, and its counterpart here."""

    theirs: str
    ours: str
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """Another system: its settings, commands and metrics that its users may look for."""

    name: str
    title: str
    about: str
    """One paragraph on the largest differences."""
    seen: str
    """The version that the table describes."""
    commands: tuple[Pair, ...]
    chapters: Mapping[str, tuple[Counterpart, ...]]
    """Its settings, by subject."""
    by_key: Mapping[str, Counterpart]
    """All settings of the chapters."""
    metrics: tuple[Pair, ...]

    @property
    def settings(self) -> Iterable[Counterpart]:
        return self.by_key.values()

    def find(self, key: str) -> Counterpart | None:
        """The setting of a key, or of the nearest section that stands for all keys below it; None if unknown."""
        if key in self.by_key:
            return self.by_key[key]
        *sections, _ = key.split(".")
        around = [".".join(sections[:depth]) for depth in range(len(sections), 0, -1)]
        return next((self.by_key[f"{each}{BELOW}"] for each in around if f"{each}{BELOW}" in self.by_key), None)


@cache
def systems() -> Mapping[str, System]:
    """The systems of elsewhere.yaml by name."""
    content = read_yaml(FILE.read_bytes(), str(FILE))
    return {name: _system(name, entry) for name, entry in content.items()}


def _system(name: str, entry: dict[str, Any]) -> System:
    commands, metrics = (tuple(Pair(**pair) for pair in entry.pop(kind)) for kind in ("commands", "metrics"))
    chapters = {
        title: tuple(_counterpart(key, row) for key, row in rows.items())
        for title, rows in entry.pop("settings").items()
    }
    by_key = {setting.theirs: setting for chapter in chapters.values() for setting in chapter}
    return System(name=name, commands=commands, chapters=chapters, by_key=by_key, metrics=metrics, **entry)


def _counterpart(key: str, row: dict[str, Any]) -> Counterpart:
    ours, harmless = row.pop("ours", ()), row.pop("harmless", ())
    return Counterpart(
        theirs=key,
        ours=(ours,) if isinstance(ours, str) else tuple(ours),
        harmless=harmless if harmless == "any" else tuple(harmless),
        has_default="default" in row,
        **row,
    )


def hint(key: str, ways: Sequence[Literal["key", "section", "first name", "last name"]]) -> str | None:
    """Describe the counterpart of another system's key for an error, in the first of these ways that finds one."""
    by_way = {
        "key": hint_for,
        "section": hint_for_section,
        "first name": hint_for_first_name,
        "last name": hint_for_last_name,
    }
    return next((found for way in ways if (found := by_way[way](key))), None)


def hint_for(key: str) -> str | None:
    """Describe the counterpart of another system's key or of its last parts; None if only the section differs."""
    if hint := _section_of_another_system(key):
        return hint
    found = _meant(key)
    renamed = [setting for _, setting in found if setting.none or _last(key) not in map(_last, setting.ours)]
    return _message(key, found) if renamed else None


def hint_for_last_name(key: str) -> str | None:
    """Describe the counterpart of another system's setting with the same last name; None if there is none."""
    name = _last(key)
    found = [(system, each) for system, each in _all() if _last(each.theirs) == name and name not in GENERIC_NAMES]
    return _message(key, found) if found else None


def hint_for_section(key: str) -> str | None:
    """Say why a whole section of another system has no counterpart here; None for a key outside such sections."""
    around = [(system, system.find(key)) for system in systems().values()]
    found = [(system, each) for system, each in around if each is not None and each.theirs.endswith(BELOW)]
    return _message(key, found) if found else None


def hint_for_first_name(key: str) -> str | None:
    """Describe the counterpart of another system's setting that has the key as a field; None for other keys."""
    first, _, field = key.partition(".")
    found = [(system, each) for system, each in _all() if field and each.theirs == first]
    return _message(key, found) if found else None


def _section_of_another_system(key: str) -> str | None:
    titles = dict.fromkeys(system.title for system, each in _all() if each.theirs.startswith(f"{key}."))
    if not titles or any(each.theirs == key for _, each in _all()):
        return None
    return f"{key}: a section of {' and '.join(titles)}; convert such settings with `fovea import-config FILE`"


def _meant(key: str) -> list[tuple[System, Counterpart]]:
    """The settings of other systems that a key names: in full if there are any, else by its last sections."""
    exact = [(system, each) for system, each in _all() if each.theirs == key]
    return exact or [(system, each) for system, each in _all() if each.theirs.endswith(f".{key}")]


def _all() -> Iterator[tuple[System, Counterpart]]:
    return ((system, setting) for system in systems().values() for setting in system.settings)


def _message(key: str, found: list[tuple[System, Counterpart]]) -> str:
    with_ours = [(system, each) for system, each in found if each.ours]
    if not with_ours:
        return f"{key} is not a setting here: {found[0][1].none}; remove it"
    distinct = {each.ours: (system, each) for system, each in reversed(with_ours)}
    counterparts = []
    for system, setting in reversed(distinct.values()):
        name = "" if setting.theirs == key else f" {setting.theirs}"
        note = f" ({setting.note})" if setting.note else ""
        counterparts.append(f"{system.title}'s{name} is {' and '.join(setting.ours)} here{note}")
    return f"{key}: no such setting; {'; '.join(counterparts)}"


def _last(key: str) -> str:
    return key.rpartition(".")[2]
