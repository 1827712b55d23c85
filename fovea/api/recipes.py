"""Recipes as arguments: one or several, by file or by name."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from fovea.config.recipes import find_recipe
from fovea.errors import ConfigError

Recipe: TypeAlias = str | os.PathLike[str]
"""A YAML file, or the name of a recipe that comes with Fovea."""


def recipe_files(recipe: Recipe | Sequence[Recipe] | None) -> list[Path]:
    """The files of one recipe or of several, of which later ones win; ConfigError for what is none."""
    words: Sequence[object] = [] if recipe is None else recipe if isinstance(recipe, list | tuple) else [recipe]
    return [find_recipe(_checked(word)) for word in words]


def _checked(word: object) -> Recipe:
    if isinstance(word, str | os.PathLike):
        return word
    raise ConfigError(
        f"recipe is given an object of type {type(word).__name__}; give a YAML file, a name that `fovea recipes` "
        "lists, or a list of them; settings in memory go into the argument settings"
    )
