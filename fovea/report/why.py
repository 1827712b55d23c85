"""Why a run collapsed or does not move: the findings of its metrics and, at its end, of its image ablation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fovea.metrics.findings import Column, Finding, find
from fovea.report.summary import SummaryJson


def run_findings(
    columns: Mapping[str, Column], settings: Mapping[str, Any], summary: SummaryJson | None
) -> list[Finding]:
    """The findings of a run; `summary` is None while it goes on."""
    return find({**columns, **(_image_ablation(summary) if summary else {})}, settings)


def _image_ablation(summary: SummaryJson) -> dict[str, Column]:
    """The accuracy with another question's image, and its share of the accuracy with the right one."""
    shuffled, steps = summary["shuffled_images"], [summary["steps"]]
    accuracy = summary.get("same_kinds", summary["accuracy"]["final"])
    if shuffled is None or not accuracy:
        return {}
    return {
        "shuffled_images/accuracy_share": (steps, [shuffled / accuracy]),
        "shuffled_images/accuracy_with": (steps, [accuracy]),
    }
