"""A recipe as text, with a comment behind each setting that says where it comes from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from fovea.config.base import Tree
from fovea.config.loading import config_of
from fovea.config.recipes import read_yaml, write_value
from fovea.config.run import Config
from fovea.errors import ConfigError
from fovea.importer.theirs import Left, Line
from fovea.importer.translate import Translation

LEFT = "Without a counterpart here, and left out:"
UNKNOWN = "Unknown, and left out:"
NEEDLESS = "These need no setting here:"


def recipe_text(translation: Translation, files: Sequence[str]) -> str:
    """The YAML of a recipe that `fovea train` takes; ConfigError, with the source of the setting, if it does not."""
    of = f" in {', '.join(files)}" if files else ""
    head = [f"# Made by `fovea import-config` from settings of {translation.system.title}{of}. Behind each setting"]
    head.append("# stands what it comes from; a default is that of " + translation.system.title + ", not of Fovea.")
    head += _listed(LEFT, _by_reason(translation.left))
    head += _listed(UNKNOWN, (f"{each.text} ({each.where})" for each in translation.unknown))
    tail = _listed(NEEDLESS, _by_reason(translation.needless))
    text = "\n".join([*head, *_section(_tree(translation.lines), 0), *tail, ""])
    _check(text, translation)
    return text


def _by_reason(left: Iterable[Left]) -> Iterator[str]:
    keys: dict[str, list[str]] = {}
    for each in left:
        keys.setdefault(each.reason, []).append(each.key)
    return (f"{', '.join(keys[reason])}: {reason}" for reason in keys)


def _listed(title: str, entries: Iterable[str]) -> list[str]:
    lines = [f"#   {_comment(entry)}" for entry in entries]
    return [f"# {title}", *lines] if lines else []


def _tree(lines: Iterable[Line]) -> Tree:
    """The lines by section, in the order of the settings."""
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
        if isinstance(value, Line):
            yield f"{indent}{name}: {write_value(value.value)}  # {_comment(value.source)}"
        else:
            yield f"{indent}{name}:"
            yield from _section(value, depth + 1)


def _comment(text: str) -> str:
    """The text with a blank in the place of what a reader of YAML takes for the end of a line or refuses."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _check(text: str, translation: Translation) -> None:
    tree: Any = read_yaml(text.encode(), "the recipe")
    try:
        config_of(tree, "the recipe")
    except ConfigError as error:
        sources = [line.source for line in translation.lines if line.key in str(error) and line.source]
        came = f" ({'; '.join(sources)})" if sources else ""
        raise ConfigError(f"{error}{came}; settings behind the file win over those in it") from None
