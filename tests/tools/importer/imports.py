"""The command import-config: its recipe, its error, and the settings of a recipe."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from fovea.cli.main import app
from fovea.config.base import Tree, leaves
from fovea.config.loading import load_config

GEO3K = ["--environment", "geo3k"]


def imported(*words: str) -> str:
    """The recipe that the command prints."""
    done = CliRunner().invoke(app, ["import-config", *words])
    assert done.exit_code == 0, done.stderr
    return done.stdout


def error_of(*words: str) -> str:
    done = CliRunner().invoke(app, ["import-config", *words])
    assert done.exit_code == 2
    assert done.stdout == ""
    return done.stderr.strip()


def resolved(recipe: str) -> Tree:
    Path("recipe.yaml").write_text(recipe, encoding="utf-8")
    return leaves(load_config([Path("recipe.yaml")], []).model_dump(mode="json"))
