"""What a shell completes in the words of a command; files are left to the shell itself."""

from __future__ import annotations

import re
from pathlib import Path

import typer

from fovea.config.describe import describe
from fovea.config.recipes import shipped_recipes

RUNS = Path("runs")
"""The folder of runs by default (run_dir)."""
CHOICES = re.compile(r"[\w.+-]+(?: \| [\w.+-]+)+|true or false")
"""The type of a setting that takes one of a few words."""
ONE_WORD = re.compile(r"[\w.+-]+")


def complete_word(ctx: typer.Context, incomplete: str) -> list[str]:
    """The recipes by name that a word may become, and the settings, with their `=` and the values of choices."""
    before = [str(word) for word in ctx.params.get("words") or []]
    if (key := _key_before(before)) is not None:
        return [value for value in _choices(key) if value.startswith(incomplete)]
    key, equals, _ = incomplete.partition("=")
    settings = _values(key) if equals else _keys(incomplete)
    return [*complete_recipe(incomplete), *(word for word in settings if word.startswith(incomplete))]


def _key_before(words: list[str]) -> str | None:
    """The setting whose value is completed: bash takes `=` for a word of its own."""
    names = words[:-1] if words and words[-1] == "=" else words
    return names[-1] if names and names[-1] in _types() else None


def _keys(incomplete: str) -> list[str]:
    found = [key for key in _types() if key.startswith(incomplete)]
    # bash and zsh put a space behind the only word there is, but none behind what several have in common
    return [f"{key}=" for key in found] if len(found) != 1 else [f"{found[0]}=", *_values(found[0])]


def _values(key: str) -> list[str]:
    """The words that set a key to each of its choices; where it has none, to its default."""
    default = next((each.default for each in describe() if each.key == key), "")
    return [f"{key}={value}" for value in _choices(key) or [default if ONE_WORD.fullmatch(default) else "VALUE"]]


def _choices(key: str) -> list[str]:
    type_ = _types().get(key, "")
    return re.split(r" \| | or ", type_) if CHOICES.fullmatch(type_) else []


def _types() -> dict[str, str]:
    return {each.key: each.type for each in describe()}


def complete_recipe(incomplete: str) -> list[str]:
    """The recipes by name that a word may become."""
    return [name for name in shipped_recipes() if name.startswith(incomplete)]


def complete_run(incomplete: str) -> list[str]:
    """The run folders below runs/ that a word may become."""
    found = (str(file.parent) for file in sorted(RUNS.glob("*/config.yaml")))
    return [folder for folder in found if folder.startswith(incomplete)]
