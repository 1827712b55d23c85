"""The figures of several targets as tables for the terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from rich.table import Table
from rich.text import Text

from fovea.evaluation.comparison import Figures
from fovea.evaluation.statistics import Difference, Estimate, format_interval

Cell = Estimate | Difference | None


def tables(figures: Sequence[Figures], title: str) -> list[Table]:
    """Everything that was read, in percent with 95 % intervals; a table of what was not read is left out."""
    kinds = _by_group(figures, "question type", lambda each: each.by_kind)
    types = _by_group(figures, "image type", lambda each: each.by_image_type)
    return [
        _accuracies(figures, title),
        *([kinds] if len(figures[0].by_kind) > 1 else []),
        *([types] if figures[0].by_image_type else []),
        *([_sampled(figures)] if any(each.pass_at for each in figures) else []),
        *([_looks(figures)] if any(each.looks for each in figures) else []),
    ]


def _accuracies(figures: Sequence[Figures], title: str) -> Table:
    caption = "Intervals: bootstrap over rows; of the difference, over pairs (the same row, both targets)."
    table = Table(title=Text(title), title_justify="left", caption=caption, caption_justify="left")
    headers = ["accuracy", "n", "skipped"]
    if len(figures) > 1:
        headers += [f"minus {figures[0].target}", "better on", "worse on"]
    _columns(table, "target", headers)
    for each in figures:
        cells = [cell(each.accuracy), Text(str(each.accuracy.n)), Text(str(each.rows_skipped))]
        if len(figures) > 1:
            difference = each.versus_first
            counts = [str(difference.better), str(difference.worse)] if difference else ["", ""]
            cells += [cell(difference), *map(Text, counts)]
        table.add_row(Text(each.target), *cells)
    return table


def _by_group(figures: Sequence[Figures], header: str, groups: Callable[[Figures], Mapping[str, Estimate]]) -> Table:
    table = Table(title=f"Accuracy by {header}", title_justify="left")
    _columns(table, header, [*(each.target for each in figures), "n"])
    for name, of_first in groups(figures[0]).items():
        table.add_row(Text(name), *(cell(groups(each).get(name)) for each in figures), str(of_first.n))
    return table


def _sampled(figures: Sequence[Figures]) -> Table:
    ks = sorted({k for each in figures for k in each.pass_at})
    table = Table(title="Sampled answers: pass@k and majority vote", title_justify="left")
    _columns(table, "target", [*(f"pass@{k}" for k in ks), f"majority of {ks[-1]}"])
    for each in figures:
        if each.pass_at:
            table.add_row(Text(each.target), *(cell(each.pass_at.get(k)) for k in ks), cell(each.majority))
    return table


def _looks(figures: Sequence[Figures]) -> Table:
    caption = "Rows with images. What shuffling and blanking lose is what the images gave."
    table = Table(title="Does it look?", title_justify="left", caption=caption, caption_justify="left")
    _columns(table, "target", ["true images", "shuffled", "blank", "lost by shuffling", "lost by blanking"])
    for each in figures:
        if looks := each.looks:
            values: list[Cell] = [
                looks.true,
                looks.shuffled,
                looks.blank,
                looks.lost_by_shuffling,
                looks.lost_by_blanking,
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


def percent_text(value: Cell) -> str:
    """`87.5 [83, 91]`; a difference has signs, and a decimal more: `+3.8 [+0.4, +7.2]`."""
    if value is None or math.isnan(value.mean):
        return ""
    if isinstance(value, Estimate):
        return f"{100 * value.mean:.1f} {format_interval((value.low, value.high))}"
    return f"{100 * value.mean:+.1f} [{100 * value.low:+.1f}, {100 * value.high:+.1f}]"
