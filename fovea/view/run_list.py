"""The runs in a folder with state, steps, latest reward and accuracy, read from the ends of their files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fovea.config.recipes import read_yaml
from fovea.evaluation.statistics import percent, percent_text
from fovea.metrics.jsonl import METRICS_FILE, parse_metrics
from fovea.report.about import CONFIG_FILE, SUMMARY_FILE, read_config
from fovea.report.about_run import max_steps_of
from fovea.report.summary import accuracy_at, read_summary
from fovea.run.lock import owner_of
from fovea_gym.errors import FoveaError
from fovea_gym.utils.bounded import open_file

MAX_RUNS = 500
TAIL_BYTES = 256 * 1024
"""Bytes read from the end of metrics.jsonl: about a hundred steps, with their evaluations on the dev rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedRun:
    """A line of the list; unknown texts are empty and unknown numbers NaN or None."""

    name: str
    state: str
    changed: float
    """Time of the newest step, or of config.yaml before the first step, in seconds since the epoch."""
    step: int = 0
    max_steps: int | None = None
    reward: float = math.nan
    accuracy: str = ""


def run_folders(folder: Path) -> dict[str, Path]:
    """The run folders in a folder, by name; symbolic links such as `latest` are left out."""
    found = (config.parent for config in folder.glob(f"*/{CONFIG_FILE}") if config.is_file())
    return {run.name: run for run in sorted(found) if not run.is_symlink()}


def is_folder_of_runs(folder: Path) -> bool:
    """True if a folder contains run folders and is not one itself."""
    return not (folder / CONFIG_FILE).is_file() and bool(run_folders(folder))


def listed_runs(folder: Path) -> list[ListedRun]:
    """The runs of a folder, at most MAX_RUNS, sorted by the time of their newest step, latest first."""
    runs = sorted(run_folders(folder).values(), key=_changed, reverse=True)
    return [_listed(run) for run in runs[:MAX_RUNS]]


def _listed(run: Path) -> ListedRun:
    try:
        settings = read_yaml(read_config(run), CONFIG_FILE)
        rows = _last_metrics(run)
        return ListedRun(
            name=run.name,
            state=_state(run),
            changed=_changed(run),
            step=int(rows[-1]["step"]) if rows else 0,
            max_steps=max_steps_of(settings),
            reward=rows[-1].get("reward", math.nan) if rows else math.nan,
            accuracy=_accuracy(run, rows),
        )
    except (FoveaError, OSError) as error:  # a damaged run must not hide the others
        return ListedRun(name=run.name, state=f"cannot be read: {error}", changed=_changed(run))


def _changed(run: Path) -> float:
    metrics = run / METRICS_FILE
    return (metrics if metrics.exists() else run / CONFIG_FILE).stat().st_mtime


def _state(run: Path) -> str:
    owner = owner_of(run)
    if owner is not None and not owner.is_here:
        return f"running on {owner.host}, or killed there"
    if owner is not None and owner.is_alive:
        return "running"
    if (run / SUMMARY_FILE).exists():
        return "finished"
    return "stopped" if owner is None else "killed"


def _last_metrics(run: Path) -> list[Mapping[str, float]]:
    """Read the newest complete lines of metrics.jsonl."""
    path = run / METRICS_FILE
    try:
        with open_file(path, within=run) as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            content = file.read(TAIL_BYTES)
    except FileNotFoundError:
        return []
    lines = content.decode("utf-8", errors="replace").split("\n")[:-1]  # the last one is empty or still being written
    whole = lines if size <= TAIL_BYTES else lines[1:]
    return [parse_metrics(line, where=f"a line of {path}") for line in whole]


def _accuracy(run: Path, rows: list[Mapping[str, float]]) -> str:
    """The final accuracy on the test rows, else the accuracy of the newest evaluation on the dev rows."""
    if (run / SUMMARY_FILE).exists() and (final := accuracy_at(read_summary(run / SUMMARY_FILE), "final")):
        return f"test {percent_text(final)} %"
    of_dev = [row["accuracy/dev"] for row in rows if "accuracy/dev" in row]
    return f"dev {percent(of_dev[-1])} %" if of_dev else ""
