"""Translates settings of another system to a recipe: each known one is mapped, none is guessed or forgotten."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from fovea.config.describe import settings
from fovea.config.loading import config_of
from fovea.config.recipes import CLOSE_ENOUGH, COMMAND_LINE, read_yaml, write_value
from fovea.config.run import Config
from fovea_gym.errors import ConfigError
from fovea_gym.settings.base import Tree
from fovea_gym.settings.type_text import show
from fovea_tools.importer import rlinf, verl
from fovea_tools.importer.elsewhere import Counterpart, System
from fovea_tools.importer.interpolation import Given
from fovea_tools.importer.source import EnvironmentName, LeftOut, RecipeLine, Rule, SourceConfig, Unusable, plain

NEARLY_THE_KEY = 0.9
"""Least similarity (difflib) of a whole key with a typo in one of its sections; names in other sections are below
it."""
RULES: Mapping[str, Mapping[str, Rule]] = {"verl": verl.RULES, "rlinf": rlinf.RULES}


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """Result of a translation; each given setting is in one of the four lists."""

    system: System
    lines: tuple[RecipeLine, ...]
    """Settings of the recipe, one for each key."""
    left: tuple[LeftOut, ...]
    """Settings without a counterpart, without which the run changes."""
    needless: tuple[LeftOut, ...]
    """Settings that need no counterpart."""
    unknown: tuple[Given, ...]


def translate(
    system: System,
    given: Mapping[str, Given],
    environment: EnvironmentName | None = None,
    count_gpus: Callable[[], int] = lambda: 0,
) -> Translation:
    """Translate the settings of another system's run, including its defaults, to those of a recipe.

    `count_gpus` counts the GPUs of this machine, for settings that mean all of them. Raises ConfigError for values that
    contradict each other, that cannot be determined, or without which no recipe can be written.
    """
    source = SourceConfig(system=system, given=given, environment=environment, count_gpus=count_gpus)
    found = list(_found(source))
    lines = tuple(_one_for_each_key(each for each in found if isinstance(each, RecipeLine)))
    left = list(dict.fromkeys(each for each in found if isinstance(each, LeftOut)))
    handled = {key for line in lines for key in line.read} | {each.key for each in left}
    silent = [key for key in given if key not in handled and system.find(key) is not None]
    left += [
        LeftOut(key=key, reason="without effect in combination with the other settings", matters=False)
        for key in silent
    ]
    unknown = {key: each for key, each in given.items() if system.find(key) is None}
    empty = [key for key, each in unknown.items() if each.value in (None, {}, [])]
    left += [LeftOut(key=key, reason="nothing is set there", matters=False) for key in empty]
    _refuse_typos((each for key, each in unknown.items() if key not in empty), system)
    return Translation(
        system=system,
        lines=lines,
        left=tuple(each for each in left if each.matters),
        needless=tuple(each for each in left if not each.matters),
        unknown=tuple(each for key, each in unknown.items() if key not in empty),
    )


def _refuse_typos(unknown: Iterable[Given], system: System) -> None:
    """Raise ConfigError for an unknown setting on the command line that is nearly the name of a known one."""
    for each in unknown:
        near = _near(each.key, system)
        if near is not None and each.where == COMMAND_LINE:
            raise ConfigError(f"{COMMAND_LINE}: {each.key}: not a setting of {system.title}; did you mean {near}?")


def _near(unknown: str, system: System) -> str | None:
    """A key of the same section with a similar name, else a key that is similar as a whole."""
    section, _, name = unknown.rpartition(".")
    beside = {key.rpartition(".")[2]: key for key in system.by_key if key.rpartition(".")[0] == section}
    if near := get_close_matches(name, beside, n=1, cutoff=CLOSE_ENOUGH):
        return beside[near[0]]
    return next(iter(get_close_matches(unknown, system.by_key, n=1, cutoff=NEARLY_THE_KEY)), None)


def _found(source: SourceConfig) -> Iterator[RecipeLine | LeftOut]:
    """Translate each setting in the order of the table; a rule runs at its first setting."""
    done = set()
    for setting in source.system.settings:
        if not setting.rule:
            yield from _usable(plain(source, setting), source, setting)
        elif setting.rule not in done:
            done.add(setting.rule)
            yield from _usable(RULES[source.system.name][setting.rule](source), source, setting)


def _usable(
    made: Iterator[RecipeLine | LeftOut], source: SourceConfig, setting: Counterpart
) -> list[RecipeLine | LeftOut]:
    """The lines from one setting, or from all settings of its rule; if one value is unusable, all are left out."""
    try:
        return list(made)
    except Unusable as error:
        bad = error.left
        found = {key: source.system.find(key) for key in source.given if setting.rule and key != bad.key}
        others = [key for key, each in found.items() if each is not None and each.rule == setting.rule]
        reason = f"read together with {bad.key}, which cannot be used"
        return [bad, *(LeftOut(key=key, reason=reason, matters=True) for key in others)]


def _one_for_each_key(lines: Iterable[RecipeLine]) -> Iterator[RecipeLine]:
    """The line of each key; a given value wins over a default, and two given values must agree."""
    by_key: dict[str, RecipeLine] = {}
    lists = {setting.key for setting in settings() if setting.type.startswith("list")}
    for given in lines:
        is_one = given.key in lists and isinstance(given.value, str)
        line = replace(given, value=[given.value]) if is_one else given
        other = by_key.setdefault(line.key, line)
        if line.value == other.value or (other.is_given and not line.is_given):
            if line.is_given and other is not line:
                by_key[line.key] = _joined(other, line)
        elif other.is_given:
            raise ConfigError(
                f"{other.source} is {line.key}={show(other.value)}, but {line.source} is {line.key}="
                f"{show(line.value)}; a run of Fovea has one value; remove one of them"
            )
        else:
            by_key[line.key] = line
    yield from by_key.values()


def _joined(first: RecipeLine, second: RecipeLine) -> RecipeLine:
    if not first.is_given:
        return second
    return replace(first, source=f"{first.source}; {second.source}", read=(*first.read, *second.read))


LEFT = "Without a counterpart here, and left out:"
UNKNOWN = "Unknown, and left out:"
NEEDLESS = "These need no setting here:"


def recipe_text(translation: Translation, files: Sequence[str]) -> str:
    """The YAML of a recipe that `fovea train` accepts; otherwise ConfigError with the setting's source."""
    of = f" in {', '.join(files)}" if files else ""
    head = [f"# Made by `fovea import-config` from settings of {translation.system.title}{of}. The comment after"]
    head.append(
        "# each setting gives its source; defaults are those of " + translation.system.title + ", not of Fovea."
    )
    head += _listed(LEFT, _by_reason(translation.left))
    head += _listed(UNKNOWN, (f"{each.text} ({each.where})" for each in translation.unknown))
    tail = _listed(NEEDLESS, _by_reason(translation.needless))
    text = "\n".join([*head, *_section(_tree(translation.lines), 0), *tail, ""])
    _check(text, translation)
    return text


def _by_reason(left: Iterable[LeftOut]) -> Iterator[str]:
    keys: dict[str, list[str]] = {}
    for each in left:
        keys.setdefault(each.reason, []).append(each.key)
    return (f"{', '.join(keys[reason])}: {reason}" for reason in keys)


def _listed(title: str, entries: Iterable[str]) -> list[str]:
    lines = [f"#   {_comment(entry)}" for entry in entries]
    return [f"# {title}", *lines] if lines else []


def _tree(lines: Iterable[RecipeLine]) -> Tree:
    """The lines by section, in the order of Fovea's settings."""
    tree: Tree = {name: {} for name in Config.model_fields}
    for line in lines:
        *sections, name = line.key.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = line
    return {name: value for name, value in tree.items() if value != {}}


def _section(tree: Tree, depth: int) -> Iterator[str]:
    indent = "  " * depth
    for name, value in tree.items():
        if isinstance(value, RecipeLine):
            yield f"{indent}{name}: {write_value(value.value)}  # {_comment(value.source)}"
        else:
            yield f"{indent}{name}:"
            yield from _section(value, depth + 1)


def _comment(text: str) -> str:
    """The text, with a space for each character that ends a YAML line or that YAML refuses."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _check(text: str, translation: Translation) -> None:
    tree: Any = read_yaml(text.encode(), "the recipe")
    try:
        config_of(tree, "the recipe")
    except ConfigError as error:
        sources = [line.source for line in translation.lines if line.key in str(error) and line.source]
        came = f" ({'; '.join(sources)})" if sources else ""
        raise ConfigError(f"{error}{came}; settings after the file win over those in it") from None
