"""The report's table of rewards, their parts and image types on the test rows. Imports no torch, for `fovea view`."""

from __future__ import annotations

from dataclasses import dataclass

from fovea.evaluation.statistics import shown_once
from fovea.evaluation.tables import mean_text
from fovea.report.summary import EstimateJson, FiguresJson, SummaryJson, estimate_from_json


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureRow:
    """A mean over the test rows with its interval, as text: before RL (after a warm-up, if any) and after it."""

    name: str
    before: str
    final: str
    n: int


def figure_rows(summary: SummaryJson) -> list[FigureRow]:
    """Accuracy by image type, reward and parts on the test rows; none in summaries of earlier versions."""
    if "test" not in summary:
        return []
    before = figures_json(summary["test"]["warmup"] or summary["test"]["before"])
    final = figures_json(summary["test"]["final"])
    return [
        FigureRow(
            name=label, before=estimate_text(before.get(name)), final=estimate_text(final[name]), n=final[name]["n"]
        )
        for name, label in shown_once((before, final)).items()
    ]


def figures_json(figures: FiguresJson | None) -> dict[str, EstimateJson]:
    """Accuracy by image type, reward and its parts, by name; empty without figures."""
    if figures is None:
        return {}
    types = {f"accuracy on {name}": value for name, value in figures["by_image_type"].items()}
    reward = {"reward": figures["reward"]} if figures["reward"] else {}
    return types | reward | figures["parts"]


def estimate_text(value: EstimateJson | None) -> str:
    """A mean with its interval; empty where there is none."""
    return "" if value is None else mean_text(estimate_from_json(value))
