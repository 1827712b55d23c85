"""The published.json of a run: the authors' figure, and every setting in which authors, recipe and run differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from fovea.config.base import Tree, leaves
from fovea.config.loading import load_config, public_settings
from fovea.config.type_text import show
from fovea.report.published import DifferingSetting, PublishedJson
from fovea.tools.published.catalogue import PublishedResult

CHANGED = "changed for this run"
OTHER_ROWS = ("environment.test_", "evaluate.test_size")
"""Beginnings of the settings that choose the test rows."""
OWN_PLACE = ("run_dir", "resume", "log.", "plan.", "threads")
"""Beginnings of those that say where a run is and what it prints, not what it does."""


def published_json(result: PublishedResult, recipes: Sequence[Path], overrides: Sequence[str]) -> PublishedJson:
    """The content of published.json; the first of the recipes are those of the result."""
    recipe, own = _settings(recipes[: len(result.recipes)], ()), _settings(recipes, overrides)
    changed = {key for key in {*recipe, *own} if recipe.get(key) != own.get(key) and not key.startswith(OWN_PLACE)}
    figure = result.figure
    return {
        "title": result.title,
        "source": result.source,
        "where": figure.where,
        "rows": figure.rows,
        "same_rows": figure.same_rows and not any(key.startswith(OTHER_ROWS) for key in changed),
        "bench": figure.bench,
        "before": figure.before,
        "after": figure.after,
        "curve": result.curve,
        "settings": [*_of_authors(result, own, changed), *_others(result, recipe, own, changed)],
    }


def _of_authors(result: PublishedResult, own: Tree, changed: set[str]) -> Iterator[DifferingSetting]:
    """The authors' settings from which the recipe differs, or this run."""
    for each in result.settings:
        why = [each.differs, CHANGED if changed & each.ours.keys() else ""]
        if any(why):
            yield {
                "theirs": f"{each.name}={show(each.value)}",
                "recipe": _shown(each.ours),
                "run": ", ".join(show(own.get(key)) for key in each.ours),
                "why": "; ".join(filter(None, why)),
            }


def _others(result: PublishedResult, recipe: Tree, own: Tree, changed: set[str]) -> Iterator[DifferingSetting]:
    """Settings that this run changed and the authors do not name."""
    for key in sorted(changed.difference(*(each.ours for each in result.settings))):
        shown = _shown({key: recipe.get(key)})
        yield {"theirs": f"({key} is not among theirs)", "recipe": shown, "run": show(own.get(key)), "why": CHANGED}


def _settings(recipes: Sequence[Path], overrides: Sequence[str]) -> Tree:
    return leaves(public_settings(load_config(recipes, overrides)))


def _shown(settings: Mapping[str, object]) -> str:
    return ", ".join(f"{key}={show(value)}" for key, value in settings.items())
