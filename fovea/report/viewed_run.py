"""A run folder as the page reads it: its curves, the index of its samples, its summary and the facts of its head."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
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


def run_findings(
    columns: Mapping[str, Column], settings: Mapping[str, Any], summary: SummaryJson | None
) -> list[Finding]:
    """The findings of a run; `summary` is None while it goes on."""
    return find({**columns, **(_image_ablation(summary) if summary else {})}, settings)


def _image_ablation(summary: SummaryJson) -> dict[str, Column]:
    """The accuracy with another question's image, and its share of the accuracy with the right one."""
    shuffled, steps = summary["shuffled_images"], [summary["steps"]]
    accuracy = summary["same_kinds"]
    if shuffled is None or not accuracy:
        return {}
    return {
        "shuffled_images/accuracy_share": (steps, [shuffled / accuracy]),
        "shuffled_images/accuracy_with": (steps, [accuracy]),
    }


PAGE_SECONDS = 0.25
"""Seconds that a page waits for a refresh of a run."""


class ViewedRun:
    """One run as the page reads it; safe to call from several threads."""

    def __init__(self, folder: Path, refresh_seconds: float = math.inf) -> None:
        """Of a long run, reads for about `refresh_seconds` now and with every refresh."""
        self.folder = folder
        self._refresh_seconds = refresh_seconds
        self._curves = Curves(folder)
        self._index = SampleIndex(folder)
        self._entries: list[str] = []  # as JSON: a page that opens wants all of them at once
        self._lock = Lock()
        self._config: str | None = None
        self._head, self._pairs = dict[str, Any](), list[list[str]]()
        self._yaml = dict[str, Any]()
        self._found: tuple[object, list[Finding]] = None, []
        self.refresh()

    def refresh(self) -> None:
        """Read what the run has written since the last time."""
        with self._lock:
            self._curves.refresh(self._refresh_seconds)
            self._index.refresh()
            new = self._index.after(len(self._entries))
            self._entries += [json.dumps(entry_json(entry), allow_nan=False) for entry in new]

    def facts(self) -> dict[str, Any]:
        """Name, progress, names of metrics and evaluations, the index's size, and remarks."""
        with self._lock:
            return {
                **self._settings(),
                "name": self.folder.resolve().name,
                "folder": str(self.folder),
                "step": self._curves.last_step,
                "share_read": self._curves.share_read,
                "finished": (self.folder / SUMMARY_FILE).exists(),
                "seconds_since_step": self._seconds_since_step(),
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
        """Why the run collapsed or does not move; empty for one that goes well."""
        with self._lock:
            self._settings()
            return self._findings()

    def summary(self) -> dict[str, Any]:
        """Figures with intervals on held-out rows, or rewards so far; time and memory."""
        with self._lock:
            summary = self._summary()
            return asdict(with_published(run_summary(summary, self._curves), summary, self.folder))

    def curve(self, number: int) -> dict[str, Any]:
        """The curve of the metric with this place in `facts()["metrics"]`; IndexError where there is none."""
        with self._lock:
            name = self._curves.names[number]
            return curve_json(name, self._curves.curve(name))

    def totals(self, number: int) -> dict[str, Any]:
        """Seconds (0) or completion tokens (1) up to each step; IndexError for another number."""
        with self._lock:
            return totals_json(self._curves.totals(get_args(Total)[number]))

    def entries(self, after: int) -> str:
        """The entries of the index after the first `after` ones, as a JSON list of `entry_json`."""
        with self._lock:
            return f"[{','.join(self._entries[after:])}]"

    def records(self, step: int) -> tuple[AnsweredRow, ...]:
        """The groups of a step; FileNotFoundError where it has none, DataError where its file is damaged."""
        return read_step(self.folder, step)

    def step(self, step: int) -> dict[str, Any]:
        """The groups of a step for the page; errors as of `records`."""
        return step_json(step, self.records(step))

    def answers(self, number: int) -> dict[str, Any]:
        """Held-out answers of the evaluation with this place in `facts()["evaluations"]`; errors as of `step`."""
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
            return []  # the steps that were read are not the newest
        key = (self._curves.last_step, self._config, (self.folder / SUMMARY_FILE).exists())
        if key != self._found[0]:  # a page asks every two seconds
            self._found = key, run_findings(self._curves.columns, self._yaml, self._summary())
        return self._found[1]

    def _settings(self) -> dict[str, Any]:
        """Settings that the page shows; a resume may change them, and a run that failed early has none."""
        config = read_config(self.folder) if (self.folder / CONFIG_FILE).exists() else ""
        if config != self._config:  # parsing YAML takes longer than all the rest
            settings = read_yaml(config, CONFIG_FILE) if config else {}
            self._yaml = settings if isinstance(settings, dict) else {}
            self._head = {"about": about(self.folder, config), "max_steps": max_steps_of(settings)}
            self._pairs = settings_pairs(settings)
            self._config = config
        return self._head

    def _seconds_since_step(self) -> float | None:
        path = self.folder / METRICS_FILE
        return max(0.0, time.time() - path.stat().st_mtime) if path.exists() else None
