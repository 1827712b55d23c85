"""Terminal tables of the metrics of several targets."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from rich.table import Table
from rich.text import Text

from fovea.evaluation.comparison import TargetMetrics
from fovea.evaluation.statistics import Difference, Estimate, format_interval, half_up, percent
from fovea.utils.shown_text import printable

Cell = Estimate | Difference | None
TARGETS_PER_TABLE = 2
"""Columns of figures in 80 of the terminal, with room for the names of figures and targets."""
FIGURE_WIDTH = 20
"""Characters of a figure with its interval: `-3.8 [-10.4, +12.2]`."""


def tables(metrics: Sequence[TargetMetrics], title: str) -> list[Table]:
    """Tables of all figures with 95 % intervals, 80 columns wide at most; tables without content are left out."""
    first = metrics[0]
    made = [[_accuracies(metrics, title)]]
    if len(metrics) > 1:
        made.append([_differences(metrics)])
    if len(first.by_kind) > 1:
        made.append(_side_by_side(metrics, "Accuracy by question type in %", lambda each: each.by_kind, show=cell))
    made.append(_side_by_side(metrics, "Accuracy by image type in %", lambda each: each.by_image_type, show=cell))
    made.append(_side_by_side(metrics, "Mean reward, and the parts of it", _rewards, show=mean_cell))
    made.append(_side_by_side(metrics, "Sampled answers: pass@k and majority vote, in %", _sampled, show=cell))
    made.append(_side_by_side(metrics, "Image ablation (shuffled, blank), accuracy in %", _image_ablation, show=cell))
    return [table for of_figure in made for table in of_figure]


def _accuracies(metrics: Sequence[TargetMetrics], title: str) -> Table:
    caption = "95 % intervals over rows: Wilson's of shares, normal ones of other means."
    table = Table(title=Text(title), title_justify="left", caption=caption, caption_justify="left")
    any_unscored = any(each.rows_unscored for each in metrics)
    _columns(table, "target", ["accuracy", "n", "skipped", *(["not scored"] if any_unscored else [])])
    for each in metrics:
        counts = [each.accuracy.n, each.rows_skipped, *([each.rows_unscored] if any_unscored else [])]
        table.add_row(Text(each.target), cell(each.accuracy), *map(str, counts))
    return table


def _differences(metrics: Sequence[TargetMetrics]) -> Table:
    title = Text(f"Accuracy minus that of {metrics[0].target}, in points")
    caption = "95 % intervals by the paired bootstrap; rows on which the target is better, and worse."
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    _columns(table, "target", ["difference", "better on", "worse on"])
    for each in metrics:
        if difference := each.versus_first:
            table.add_row(Text(each.target), cell(difference), str(difference.better), str(difference.worse))
    return table


def _side_by_side(
    metrics: Sequence[TargetMetrics],
    title: str,
    figures_of: Callable[[TargetMetrics], Mapping[str, Cell]],
    *,
    show: Callable[[Cell], Text],
) -> list[Table]:
    """A line for each figure and a column for each target, in tables of a few targets; none without figures."""
    having = [each for each in metrics if figures_of(each)]
    names = dict.fromkeys(name for each in having for name in figures_of(each))
    made = []
    for start in range(0, len(having), TARGETS_PER_TABLE):
        shown = having[start : start + TARGETS_PER_TABLE]
        table = Table(title=title, title_justify="left")
        _columns(table, "", [*(each.target for each in shown), "n"])
        for name in names:
            figures = [figures_of(each).get(name) for each in shown]
            table.add_row(Text(printable(name)), *map(show, figures), _counts(figures))
        made.append(table)
    return made


def _counts(figures: Sequence[Cell]) -> str:
    """The number of rows behind figures, once where all are of the same number."""
    return " / ".join(dict.fromkeys(str(value.n) for value in figures if value is not None))


def _rewards(each: TargetMetrics) -> Mapping[str, Cell]:
    return {"reward": each.reward, **each.parts}


def _sampled(each: TargetMetrics) -> Mapping[str, Cell]:
    if not each.pass_at:
        return {}
    majority = {f"majority of {max(each.pass_at)}": each.majority}
    return {f"pass@{k}": value for k, value in each.pass_at.items()} | majority


def _image_ablation(each: TargetMetrics) -> Mapping[str, Cell]:
    ablation = each.image_ablation
    if ablation is None:
        return {}
    return {
        "true images": ablation.true,
        "shuffled": ablation.shuffled,
        "blank": ablation.blank,
        "lost by shuffling": ablation.lost_by_shuffling,
        "lost by blanking": ablation.lost_by_blanking,
    }


def _columns(table: Table, first: str, others: Sequence[str]) -> None:
    """Columns of figures as wide as they need to be; long names fold."""
    table.add_column(first, overflow="fold", min_width=10)
    for header in others:
        table.add_column(Text(header), justify="right", overflow="fold", min_width=min(len(header), FIGURE_WIDTH))


def cell(value: Cell) -> Text:
    mean, _, interval = percent_text(value).partition(" ")
    return Text.assemble((mean, "bold"), (f" {interval}", "dim")) if mean else Text("")


def mean_cell(value: Cell) -> Text:
    """A mean in its own unit, with its interval."""
    mean, _, interval = mean_text(value).partition(" ")
    return Text.assemble((mean, "bold"), (f" {interval}", "dim")) if mean else Text("")


def mean_text(value: Cell) -> str:
    """A mean in its own unit as `0.512 [0.48, 0.54]` or `1,312 [1,250, 1,375]`; empty where undefined."""
    if value is None or math.isnan(value.mean):
        return ""
    interval = f" [{_short(value.low)}, {_short(value.high)}]" if math.isfinite(value.low) else ""
    return f"{_short(value.mean)}{interval}"


def _short(value: float) -> str:
    """Three digits, and no exponent for thousands (kilometres)."""
    value = half_up(value)
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"


def percent_text(value: Cell) -> str:
    """An estimate as `87.5 [83, 91]`, a difference as `+3.8 [+0.4, +7.2]`, in percent; empty where undefined."""
    if value is None or math.isnan(value.mean):
        return ""
    if isinstance(value, Estimate):
        return f"{percent(value.mean)} {format_interval((value.low, value.high))}"
    mean, low, high = (half_up(100 * each) for each in (value.mean, value.low, value.high))
    return f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]"
