"""The report's table of rewards, their parts and image types on the test rows."""

from __future__ import annotations

from dataclasses import dataclass

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
    before, final = summary["test"]["warmup"] or summary["test"]["before"], summary["test"]["final"]
    return [
        FigureRow(name=name, before=_mean_text(_figures(before).get(name)), final=_mean_text(value), n=value["n"])
        for name, value in _figures(final).items()
    ]


def _figures(figures: FiguresJson | None) -> dict[str, EstimateJson]:
    if figures is None:
        return {}
    types = {f"accuracy on {name}": value for name, value in figures["by_image_type"].items()}
    reward = {"reward": figures["reward"]} if figures["reward"] else {}
    return types | reward | figures["parts"]


def _mean_text(value: EstimateJson | None) -> str:
    return "" if value is None else mean_text(estimate_from_json(value))
