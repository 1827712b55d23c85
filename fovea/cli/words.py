"""Words of a command line: recipes, and settings that win over them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from fovea.cli.completion import complete_word
from fovea.cli.recipes import NEEDS_ANOTHER, describe_recipe
from fovea.config.describe import describe
from fovea.config.recipes import find_recipe, shipped_recipes
from fovea.errors import ConfigError

WORDS_HELP = (
    "YAML files of settings, or names that `fovea recipes` lists (later ones win), and single settings, which win over "
    "them; values are YAML."
)

OPTIONS: Mapping[str, str] = {
    "train": "--dry-run, --all-rows, --quiet, --debug and --help",
    "plan": "--json, --debug and --help",
    "doctor": "--gpu, --cpu, --debug and --help",
}
"""Options of the commands that take what begins with a dash for a word."""

Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="RECIPE|KEY=VALUE", help=WORDS_HELP, autocompletion=complete_word),
]


def sort_words(words: list[str], command: str = "train") -> tuple[list[Path], list[str]]:
    """The words split into recipes and overrides; ConfigError, with the likely intent, for a word that is neither."""
    recipes, overrides = [], []
    for word in words:
        key, equals, _ = word.partition("=")
        if word.startswith("-"):
            raise ConfigError(_no_option(word, OPTIONS[command]))
        if equals and "/" not in key and not Path(word).is_file():  # a path may hold `=`
            overrides.append(word)
        elif not is_recipe(word) and is_key(word):
            raise ConfigError(f"{word}: a setting without a value; write {word}=VALUE")
        else:
            recipes.append(find_recipe(word))
    if not recipes:
        raise ConfigError(f"no recipe given; write fovea {command} shapes [KEY=VALUE]...")
    if recipes[0].resolve() in shipped_recipes().values() and describe_recipe(recipes[0]).needs.startswith(
        NEEDS_ANOTHER
    ):
        name = recipes[0].stem
        raise ConfigError(f"{name}: this recipe changes the one before it; write fovea {command} vqa {name}")
    return recipes, overrides


def _no_option(word: str, options: str) -> str:
    key = bare_key(word)
    if is_key(key):
        value = word.partition("=")[2] or "VALUE"
        return f"{word}: settings have no dashes; write {key}={value}"
    return f"{word}: no such option; there are {options}, and settings are written key=value"


def bare_key(word: str) -> str:
    return word.lstrip("-").partition("=")[0]


def is_recipe(word: str) -> bool:
    """Whether a word is written as a file is, or is the name of a file or of a recipe that comes with Fovea."""
    return "/" in word or word.endswith((".yaml", ".yml")) or Path(word).is_file() or word in shipped_recipes()


def is_key(word: str) -> bool:
    try:
        return bool(describe(word))
    except ConfigError:
        return False
