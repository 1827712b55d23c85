"""A run folder as the page reads it: curves, index of samples, summary, and the facts in the page's head."""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict
from pathlib import Path
from threading import Lock
from typing import Any, get_args

from fovea.config.recipes import read_yaml
from fovea.evaluation.records import AnsweredRow
from fovea.metrics.findings import Column, Finding, find
from fovea.metrics.jsonl import METRICS_FILE
from fovea.report.about import CONFIG_FILE, SUMMARY_FILE, about, read_config
from fovea.report.about_run import console_bytes, console_text, hints, max_steps_of, settings_pairs
from fovea.report.answers import curve_json, entry_json, step_json, totals_json
from fovea.report.curves import Curves, SampleIndex, Total
from fovea.report.figures import run_summary
from fovea.report.held_out import answers_json, evaluations
from fovea.report.published import with_published
from fovea.report.samples import read_step
from fovea.report.summary import SummaryJson, read_summary


def _image_ablation(summary: SummaryJson) -> dict[str, Column]:
    """Columns for `find`: the accuracy with the right image, and the share of it that remains with another image."""
    shuffled, steps = summary["shuffled_images"], [summary["steps"]]
    accuracy = summary["same_kinds"]
    if shuffled is None or not accuracy:
        return {}
    return {
        "shuffled_images/accuracy_share": (steps, [shuffled / accuracy]),
        "shuffled_images/accuracy_with": (steps, [accuracy]),
    }


PAGE_SECONDS = 0.25
"""Longest time that a request of the page waits for a run to be refreshed, in seconds."""


class ViewedRun:
    """One run as the page reads it; thread-safe."""

    def __init__(self, folder: Path, refresh_seconds: float = math.inf) -> None:
        """Each refresh, and the first one here, reads for about `refresh_seconds` at most."""
        self.folder = folder
        self._refresh_seconds = refresh_seconds
        self._curves = Curves(folder)
        self._index = SampleIndex(folder)
        self._entries: list[str] = []  # stored as JSON: a page that is opened requests all of them at once
        self._lock = Lock()
        self._config: str | None = None
        self._head, self._pairs = dict[str, Any](), list[list[str]]()
        self._yaml = dict[str, Any]()
        self._found: tuple[object, list[Finding]] = None, []
        self.refresh()

    def refresh(self) -> None:
        """Read what the run has written since the last refresh."""
        with self._lock:
            self._curves.refresh(self._refresh_seconds)
            self._index.refresh()
            new = self._index.after(len(self._entries))
            self._entries += [json.dumps(entry_json(entry), allow_nan=False) for entry in new]

    def facts(self) -> dict[str, Any]:
        """The run's name, progress, hints and findings, names of metrics and evaluations, and size of the index."""
        file = self.folder / METRICS_FILE
        with self._lock:
            return {
                **self._settings(),
                "name": self.folder.resolve().name,
                "folder": str(self.folder),
                "step": self._curves.last_step,
                "share_read": self._curves.share_read,
                "finished": (self.folder / SUMMARY_FILE).exists(),
                "seconds_since_step": max(0.0, time.time() - file.stat().st_mtime) if file.exists() else None,
                "metrics": self._curves.names,
                "repeats": self._curves.repeats(),
                "rounding": self._curves.rounding(),
                "entries": len(self._entries),
                "newest_entry": self._index.newest,
                "console_bytes": console_bytes(self.folder),
                "hints": hints(self.folder),
                "findings": [asdict(finding) for finding in self._findings()],
                "evaluations": evaluations(self.folder),
                "left_out": "",
            }

    def findings(self) -> list[Finding]:
        """Why the run collapsed or does not learn; empty if it goes well."""
        with self._lock:
            self._settings()
            return self._findings()

    def summary(self) -> dict[str, Any]:
        """Figures with intervals on held-out rows, or before the end the rewards so far; time and memory."""
        with self._lock:
            summary = self._summary()
            return asdict(with_published(run_summary(summary, self._curves), summary, self.folder))

    def curve(self, number: int) -> dict[str, Any]:
        """The curve of metric `number` in `facts()["metrics"]`; IndexError if there is none."""
        with self._lock:
            name = self._curves.names[number]
            return curve_json(name, self._curves.curve(name))

    def totals(self, number: int) -> dict[str, Any]:
        """Total seconds (0) or completion tokens (1) up to each step; IndexError for another number."""
        with self._lock:
            return totals_json(self._curves.totals(get_args(Total)[number]))

    def entries(self, after: int) -> str:
        """The index entries without the first `after` ones, as a JSON list of `entry_json`."""
        with self._lock:
            return f"[{','.join(self._entries[after:])}]"

    def records(self, step: int) -> tuple[AnsweredRow, ...]:
        """The groups of a step; FileNotFoundError if it has none, DataError if its file is damaged."""
        return read_step(self.folder, step)

    def step(self, step: int) -> dict[str, Any]:
        """The groups of a step as JSON for the page; raises the same errors as `records`."""
        return step_json(step, self.records(step))

    def answers(self, number: int) -> dict[str, Any]:
        """Held-out answers of evaluation `number` in `facts()["evaluations"]`; IndexError if there is none."""
        return answers_json(self.folder, number)

    def settings_and_console(self) -> dict[str, Any]:
        """The settings as pairs of key and value, and the end of the console output."""
        with self._lock:
            self._settings()
            return {"settings": self._pairs, "console": console_text(self.folder)}

    def _summary(self) -> SummaryJson | None:
        path = self.folder / SUMMARY_FILE
        return read_summary(path) if path.exists() else None

    def _findings(self) -> list[Finding]:
        if self._curves.share_read < 1:
            return []  # the newest steps have not been read yet
        key = (self._curves.last_step, self._config, (self.folder / SUMMARY_FILE).exists())
        if key != self._found[0]:  # cached: an open page asks every two seconds
            summary = self._summary()
            columns = {**self._curves.columns, **(_image_ablation(summary) if summary else {})}
            self._found = key, find(columns, self._yaml)
        return self._found[1]

    def _settings(self) -> dict[str, Any]:
        """The facts that come from the settings; a resume may change them, and a run that failed early has none."""
        config = read_config(self.folder) if (self.folder / CONFIG_FILE).exists() else ""
        if config != self._config:  # cached: parsing YAML takes longer than the rest of a poll
            settings = read_yaml(config, CONFIG_FILE) if config else {}
            self._yaml = settings if isinstance(settings, dict) else {}
            self._head = {"about": about(self.folder, config), "max_steps": max_steps_of(settings)}
            self._pairs = settings_pairs(settings)
            self._config = config
        return self._head
