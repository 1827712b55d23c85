"""Terminal tables of the metrics of several targets."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from rich.table import Table
from rich.text import Text

from fovea.evaluation.comparison import TargetMetrics
from fovea.evaluation.statistics import Difference, Estimate, format_interval

Cell = Estimate | Difference | None


def tables(metrics: Sequence[TargetMetrics], title: str) -> list[Table]:
    """Tables of accuracies in percent with 95 % intervals; tables without content are left out."""
    kinds = _by_group(metrics, "question type", lambda each: each.by_kind)
    types = _by_group(metrics, "image type", lambda each: each.by_image_type)
    return [
        _accuracies(metrics, title),
        *([kinds] if len(metrics[0].by_kind) > 1 else []),
        *([types] if metrics[0].by_image_type else []),
        *([_sampled(metrics)] if any(each.pass_at for each in metrics) else []),
        *([_image_ablation(metrics)] if any(each.image_ablation for each in metrics) else []),
    ]


def _accuracies(metrics: Sequence[TargetMetrics], title: str) -> Table:
    caption = "95 % Wilson intervals over rows; of the difference, paired bootstrap."
    table = Table(title=Text(title), title_justify="left", caption=caption, caption_justify="left")
    any_unscored = any(each.rows_unscored for each in metrics)
    headers = ["accuracy", "n", "skipped", *(["not scored"] if any_unscored else [])]
    if len(metrics) > 1:
        headers += [f"minus {metrics[0].target}", "better on", "worse on"]
    _columns(table, "target", headers)
    for each in metrics:
        cells = [cell(each.accuracy), Text(str(each.accuracy.n)), Text(str(each.rows_skipped))]
        cells += [Text(str(each.rows_unscored))] if any_unscored else []
        if len(metrics) > 1:
            difference = each.versus_first
            counts = [str(difference.better), str(difference.worse)] if difference else ["", ""]
            cells += [cell(difference), *map(Text, counts)]
        table.add_row(Text(each.target), *cells)
    return table


def _by_group(
    metrics: Sequence[TargetMetrics], header: str, groups: Callable[[TargetMetrics], Mapping[str, Estimate]]
) -> Table:
    table = Table(title=f"Accuracy by {header}", title_justify="left")
    _columns(table, header, [*(each.target for each in metrics), "n"])
    for name, of_first in groups(metrics[0]).items():
        table.add_row(Text(name), *(cell(groups(each).get(name)) for each in metrics), str(of_first.n))
    return table


def _sampled(metrics: Sequence[TargetMetrics]) -> Table:
    ks = sorted({k for each in metrics for k in each.pass_at})
    table = Table(title="Sampled answers: pass@k and majority vote", title_justify="left")
    _columns(table, "target", [*(f"pass@{k}" for k in ks), f"majority of {ks[-1]}"])
    for each in metrics:
        if each.pass_at:
            table.add_row(Text(each.target), *(cell(each.pass_at.get(k)) for k in ks), cell(each.majority))
    return table


def _image_ablation(metrics: Sequence[TargetMetrics]) -> Table:
    caption = "Rows with images. The accuracy lost by shuffling or blanking them is what the images contribute."
    table = Table(
        title="Image ablation (shuffled, blank)", title_justify="left", caption=caption, caption_justify="left"
    )
    _columns(table, "target", ["true images", "shuffled", "blank", "lost by shuffling", "lost by blanking"])
    for each in metrics:
        if ablation := each.image_ablation:
            values: list[Cell] = [
                ablation.true,
                ablation.shuffled,
                ablation.blank,
                ablation.lost_by_shuffling,
                ablation.lost_by_blanking,
            ]
            table.add_row(Text(each.target), *map(cell, values))
    return table


def _columns(table: Table, first: str, others: Sequence[str]) -> None:
    table.add_column(first, overflow="fold")
    for header in others:
        table.add_column(Text(header), justify="right")


def cell(value: Cell) -> Text:
    mean, _, interval = percent_text(value).partition(" ")
    return Text.assemble((mean, "bold"), (f" {interval}", "dim")) if mean else Text("")


def mean_cell(value: Cell) -> Text:
    """A mean in its own unit, with its interval."""
    mean, _, interval = mean_text(value).partition(" ")
    return Text.assemble((mean, "bold"), (f" {interval}", "dim")) if mean else Text("")


def mean_text(value: Cell) -> str:
    """A mean in its own unit as `0.512 [0.48, 0.54]` or `312 [250, 375]`; empty where undefined."""
    if value is None or math.isnan(value.mean):
        return ""
    interval = f" [{value.low:.3g}, {value.high:.3g}]" if math.isfinite(value.low) else ""
    return f"{value.mean:.3g}{interval}"


def percent_text(value: Cell) -> str:
    """An estimate as `87.5 [83, 91]`, a difference as `+3.8 [+0.4, +7.2]`, in percent; empty where undefined."""
    if value is None or math.isnan(value.mean):
        return ""
    if isinstance(value, Estimate):
        return f"{100 * value.mean:.1f} {format_interval((value.low, value.high))}"
    return f"{100 * value.mean:+.1f} [{100 * value.low:+.1f}, {100 * value.high:+.1f}]"
