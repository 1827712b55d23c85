"""What a shell completes in the words of a command; files are left to the shell itself."""

from __future__ import annotations

from pathlib import Path

from fovea.config.describe import describe
from fovea.config.recipes import shipped_recipes

RUNS = Path("runs")
"""The folder of runs by default (run_dir)."""


def complete_word(incomplete: str) -> list[str]:
    """The recipes by name that a word may become, and the settings, with their `=`."""
    settings = (f"{each.key}=" for each in describe())
    return [*complete_recipe(incomplete), *(key for key in settings if key.startswith(incomplete))]


def complete_recipe(incomplete: str) -> list[str]:
    """The recipes by name that a word may become."""
    return [name for name in shipped_recipes() if name.startswith(incomplete)]


def complete_run(incomplete: str) -> list[str]:
    """The run folders below runs/ that a word may become."""
    found = (str(file.parent) for file in sorted(RUNS.glob("*/config.yaml")))
    return [folder for folder in found if folder.startswith(incomplete)]
