"""Published results with their authors' settings, read from results.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from fovea.config.recipes import read_yaml
from fovea_gym.errors import ConfigError

FILE = Path(__file__).with_name("results.yaml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Accuracies in 0..1 before and after training; None if the authors publish none."""

    before: float | None
    after: float | None
    rows: str
    """The rows that the figure was measured on, and how they were answered."""
    same_rows: bool
    """True if the recipe's test rows are the same rows."""
    where: str
    bench: str = ""
    """Benchmark of `fovea eval` that this figure, or another one of the same result, was measured on; empty for
    none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthorSetting:
    """One setting of the authors."""

    name: str
    value: Any
    ours: Mapping[str, Any]
    """The recipe's settings that correspond to it; empty without a counterpart."""
    differs: str
    """Description of the difference; empty if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedResult:
    """A published training run, and the recipes that follow it."""

    name: str
    title: str
    recipes: tuple[str, ...]
    source: str
    figure: Figure
    curve: str
    gpus: str
    rows_by_hand: str
    """Instructions for getting the rows where a command cannot fetch them."""
    data_command: str | None
    """Command that writes the rows."""
    system: str | None
    """System whose importer reads the settings."""
    environment: str | None
    """Environment for the importer, if the settings do not name one."""
    settings: tuple[AuthorSetting, ...]

    @property
    def figure_text(self) -> str:
        """The figure as one line."""
        values = (self.figure.before, self.figure.after)
        known = [f"{100 * value:.3g} %" for value in values if value is not None]
        return f"{' -> '.join(known)} ({self.figure.rows})" if known else "none that could be read"


@cache
def published_results() -> Mapping[str, PublishedResult]:
    """All results by name."""
    return {name: _result(name, entry) for name, entry in read_yaml(FILE.read_bytes(), str(FILE)).items()}


def find_result(name: str) -> PublishedResult:
    """The result with this name; ConfigError with the nearest names for an unknown one."""
    results = published_results()
    if name not in results:
        near = get_close_matches(name.lower(), results, n=3, cutoff=0.4)
        there_are = f"did you mean {' or '.join(near)}?" if near else f"the names are {', '.join(results)};"
        raise ConfigError(f"{name}: not a published result; {there_are} `fovea reproduce --list` describes all")
    return results[name]


def _result(name: str, entry: Mapping[str, Any]) -> PublishedResult:
    return PublishedResult(
        name=name,
        title=entry["title"],
        recipes=tuple(entry["recipes"]),
        source=entry["source"],
        figure=Figure(**entry["figure"]),
        curve=entry["curve"],
        gpus=str(entry["gpus"]),
        rows_by_hand=entry["data"]["how"],
        data_command=entry["data"].get("command"),
        system=entry.get("system"),
        environment=entry.get("environment"),
        settings=tuple(_setting(key, row) for key, row in entry["settings"].items()),
    )


def _setting(name: str, row: Mapping[str, Any]) -> AuthorSetting:
    ours, value = row.get("ours", {}), row["is"]
    ours = {ours: value} if isinstance(ours, str) else ours
    return AuthorSetting(name=name, value=value, ours=ours, differs=row.get("differs", ""))
