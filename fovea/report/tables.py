"""Tables for the terminal: the figures of several evaluated targets, and the final figures of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from rich.table import Table
from rich.text import Text

from fovea.evaluation.comparison import TargetMetrics
from fovea.evaluation.statistics import figures_of, mean_text, percent_text
from fovea.report.figures import (
    DEPENDENCE,
    Cell,
    FigureTable,
    accuracy_table,
    dependence_of,
    image_ablation_of,
    reward_tables,
    rewards_of,
    sampled_of,
)
from fovea.report.summary import Summary, duplicates_text, not_scored_text, stages_on_test
from fovea.types import Evaluation
from fovea_gym.utils.shown_text import printable

TARGETS_PER_TABLE = 2
"""Targets that fit side by side into 80 columns of a terminal, next to the names of the figures."""
FIGURE_WIDTH = 20
"""Width in characters of a figure with its interval: `-3.8 [-10.4, +12.2]`."""


def tables(metrics: Sequence[TargetMetrics], title: str) -> list[Table]:
    """Tables of all figures with 95 % intervals, at most 80 columns wide; empty tables are left out."""
    made = [_accuracies(metrics, title)]
    if len(metrics) > 1:
        made.append(_differences(metrics))
    if len(metrics[0].by_kind) > 1:
        made += _side_by_side(metrics, "Accuracy by question type in %", lambda each: each.by_kind, show=percent_text)
    made += _side_by_side(metrics, "Accuracy by image type in %", lambda each: each.by_image_type, show=percent_text)
    made += _side_by_side(metrics, "Mean reward, and the parts of it", rewards_of, show=mean_text)
    made += _side_by_side(metrics, "Sampled answers: pass@k and majority vote, in %", sampled_of, show=percent_text)
    made += _side_by_side(
        metrics, "Image ablation (shuffled, blank), accuracy in %", image_ablation_of, show=percent_text
    )
    made += _side_by_side(metrics, DEPENDENCE, dependence_of, show=mean_text)
    return made


def _accuracies(metrics: Sequence[TargetMetrics], title: str) -> Table:
    table = _table(title, "95 % intervals over rows: Wilson's of shares, normal ones of other means.")
    any_unscored = any(each.rows_unscored for each in metrics)
    _columns(table, "target", ["accuracy", "n", "skipped", *(["not scored"] if any_unscored else [])])
    for each in metrics:
        counts = [each.accuracy.n, each.rows_skipped, *([each.rows_unscored] if any_unscored else [])]
        table.add_row(Text(each.target), _styled(percent_text(each.accuracy)), *map(str, counts))
    return table


def _differences(metrics: Sequence[TargetMetrics]) -> Table:
    caption = "95 % intervals by the paired bootstrap; rows on which the target is better, and worse."
    table = _table(f"Accuracy minus that of {metrics[0].target}, in points", caption)
    _columns(table, "target", ["difference", "better on", "worse on"])
    for each in metrics:
        if difference := each.versus_first:
            counts = (str(difference.better), str(difference.worse))
            table.add_row(Text(each.target), _styled(percent_text(difference)), *counts)
    return table


def _side_by_side(
    metrics: Sequence[TargetMetrics],
    title: str,
    figures_of_target: Callable[[TargetMetrics], Mapping[str, Cell]],
    *,
    show: Callable[[Cell], str],
) -> list[Table]:
    """Tables with a line per figure and a column per target, TARGETS_PER_TABLE each; none if there are no figures."""
    having = [(each.target, figures) for each in metrics if (figures := figures_of_target(each))]
    labels = {name: name for _, figures in having for name in figures}
    parts = (having[start : start + TARGETS_PER_TABLE] for start in range(0, len(having), TARGETS_PER_TABLE))
    return [_figures(_table(title), "", part, labels, show) for part in parts]


def tables_of(summary: Summary) -> list[Table]:
    """The tables that a run prints at its end, with the same figures as its page; empty tables are left out."""
    rewards = [rendered(table) for table in reward_tables(summary.to_json())]
    return [summary_table(summary), *rewards, *filter(None, [controls_table(summary)])]


def summary_table(summary: Summary) -> Table:
    """Accuracies in percent with 95 % intervals: before training, after warm-up, after RL."""
    figures = summary.to_json()
    missing = not_scored_text({stage: each.rows_unscored for stage, each in stages_on_test(figures).items()})
    found = duplicates_text(summary.duplicates_across_splits, summary.duplicates_searched_frac)
    return rendered(accuracy_table(figures), " ".join(filter(None, [found, missing])))


def rendered(figures: FigureTable, caption: str = "") -> Table:
    """Convert a table of the page into one for the terminal."""
    table = _table(figures.title, caption)
    _columns(table, figures.first, [*figures.columns, "n"])
    for place, row in enumerate(figures.rows):
        if place and row.name == "all":
            table.add_section()
        table.add_row(Text(printable(row.name)), *map(_styled, row.texts), "" if row.n is None else f"{row.n}")
    return table


def controls_table(summary: Summary) -> Table | None:
    """Image ablation of the trained model, by question type; None if no ablation was run."""
    controls = {"shuffled images": summary.shuffled_images, "blank images": summary.blank_images}
    columns = {"true images": summary.final} | {name: control for name, control in controls.items() if control}
    if len(columns) == 1:
        return None
    shown = {"shuffled": "each question with another question's images", "blank": "each question with grey images"}
    shown = {name: text for name, text in shown.items() if f"{name} images" in columns}
    caption = "; ".join(f"{name}: {text}" for name, text in shown.items())
    caption = (
        f"{caption.capitalize()}. {'Both show' if len(shown) > 1 else 'It shows'} the accuracy without the picture."
    )
    missing = not_scored_text({name: evaluation.num_unscored for name, evaluation in columns.items()})
    table = _table(f"Image ablation ({', '.join(shown)}), after RL", " ".join(filter(None, [caption, missing])))
    return _by_type(table, columns, summary.final.accuracies)


def _by_type(table: Table, columns: Mapping[str, Evaluation], kinds: Iterable[str]) -> Table:
    """Add a line for each question type, and one for all rows, to the table; returns the table."""
    figures = {header: figures_of(evaluation) for header, evaluation in columns.items()}
    of_kinds = [(header, each.by_type) for header, each in figures.items()]
    labels = {kind: kind for kind in kinds}
    table = _figures(table, "question type", of_kinds, labels, percent_text)
    if set(labels) != {"all"}:
        table.add_section()
        _add_row(table, "all", [each.accuracy for each in figures.values()], percent_text)
    return table


def _table(title: str, caption: str = "") -> Table:
    return Table(title=Text(title), title_justify="left", caption=caption or None, caption_justify="left")


def _figures(
    table: Table,
    first: str,
    columns: Sequence[tuple[str, Mapping[str, Cell]]],
    labels: Mapping[str, str],
    show: Callable[[Cell], str],
) -> Table:
    """Add a line for each label and a column for each set of figures to the table; returns the table."""
    _columns(table, first, [*(header for header, _ in columns), "n"])
    for name, label in labels.items():
        _add_row(table, label, [figures.get(name) for _, figures in columns], show)
    return table


def _columns(table: Table, first: str, others: Sequence[str]) -> None:
    """Add columns that are as wide as their figures; long names are folded."""
    table.add_column(first, overflow="fold", min_width=10)
    for header in others:
        table.add_column(Text(header), justify="right", overflow="fold", min_width=min(len(header), FIGURE_WIDTH))


def _add_row(table: Table, label: str, figures: Sequence[Cell], show: Callable[[Cell], str]) -> None:
    """Add a line of figures with their numbers of rows, printed once if all figures have the same number."""
    counts = " / ".join(dict.fromkeys(str(value.n) for value in figures if value is not None))
    table.add_row(Text(printable(label)), *(_styled(show(value)) for value in figures), counts)


def _styled(figure: str) -> Text:
    mean, _, interval = figure.partition(" ")
    return Text.assemble((mean, "bold"), (f" {interval}", "dim")) if mean else Text("")
