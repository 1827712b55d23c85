"""The figures in the page's summary of a run or of a target of `fovea eval`: texts and bars."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from fovea.evaluation.comparison import TargetMetrics
from fovea.evaluation.statistics import (
    Difference,
    Figures,
    format_interval,
    mean_text,
    percent,
    percent_text,
    shown_once,
)
from fovea.metrics.jsonl import BESIDE_STEPS
from fovea.report.curves import Curves
from fovea.report.summary import (
    STAGES,
    Stage,
    SummaryJson,
    accuracy_at,
    by_type_at,
    duplicates_text,
    not_scored_text,
    stages_on_test,
)
from fovea_gym.benchmarks.estimates import Estimate

Cell: TypeAlias = Estimate | Difference | None
DEPENDENCE = "Dependence on the picture: nats per token of the answer"
Bar: TypeAlias = tuple[float, float, float]
"""Low end, mean and high end of an interval, as shares in 0..1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stat:
    """A labelled number, formatted for display."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureRow:
    """A line of a table: a text for each column, the number of rows that they are computed from, and a bar if any."""

    name: str
    texts: tuple[str, ...]
    n: int | None = None
    bar: Bar | None = None
    before: float | None = None
    """Share at the stage before the bar's stage, drawn as a dot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureTable:
    """A table; the page shows the tables of several runs that have the same title side by side."""

    title: str
    first: str
    """Head of the column of names."""
    columns: tuple[str, ...]
    rows: tuple[FigureRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """The summary of a run or of an evaluated target."""

    line: str = ""
    """A sentence with the run's steps, seed and seconds."""
    headline: tuple[Stat, ...] = ()
    tables: tuple[FigureTable, ...] = ()
    notes: tuple[str, ...] = ()
    machine: tuple[Stat, ...] = ()
    """Figures of memory and throughput."""


def run_summary(summary: SummaryJson | None, curves: Curves) -> RunSummary:
    """The summary of a run; `summary` is None until the run has finished."""
    time = [table for table in [_phases(curves)] if table.rows]
    machine = _machine(curves)
    if summary is None:
        return RunSummary(headline=_rewards_so_far(curves), tables=tuple(time), machine=machine)
    seconds = summary["seconds"]
    total = f"RL {seconds['rl']:,.0f} s, {seconds['total']:,.0f} s in total"
    warmup = f"warm-up {seconds['warmup']:,.0f} s, " if seconds["warmup"] else ""
    unscored = {stage: figures.rows_unscored for stage, figures in stages_on_test(summary).items()}
    notes = (
        _controls_note(summary),
        not_scored_text(unscored),
        duplicates_text(summary["duplicates_across_splits"], summary["duplicates_searched_frac"]),
    )
    held_out = [accuracy_table(summary), *reward_tables(summary)]
    accuracies = {stage: value for stage in STAGES if (value := accuracy_at(summary, stage))}
    return RunSummary(
        line=f"{summary['steps']:,} RL steps, seed {summary['seed']}; {warmup}{total}",
        headline=tuple(_accuracy_stat(_label(summary, stage), value) for stage, value in accuracies.items()),
        tables=(*held_out, *time),
        notes=tuple(filter(None, notes)),
        machine=machine,
    )


def target_summary(metrics: TargetMetrics, reference: str) -> RunSummary:
    """The summary of an evaluated target; `reference` names the target whose accuracy is subtracted."""
    rows = [_share_row("all", [metrics.accuracy])]
    kinds = metrics.by_kind if len(metrics.by_kind) > 1 else {}
    rows += [_share_row(kind, [value]) for kind, value in kinds.items()]
    rows += [_share_row(f"images: {name}", [value]) for name, value in metrics.by_image_type.items()]
    if difference := metrics.versus_first:
        rows.append(_row(f"all, minus {reference}", [difference], percent_text))
        rows.append(FigureRow(name="rows on which it is better", texts=(f"{difference.better:,}",)))
        rows.append(FigureRow(name="rows on which it is worse", texts=(f"{difference.worse:,}",)))
    left_out = {"skipped": metrics.rows_skipped, "not scored": metrics.rows_unscored}
    rows += [FigureRow(name=f"rows {name}", texts=(f"{count:,}",)) for name, count in left_out.items() if count]
    ablation = [_share_row(name, [value]) for name, value in image_ablation_of(metrics).items()]
    tables = {
        ("Accuracy of greedy answers in %", "rows"): rows,
        ("Mean reward and its parts", "mean of"): [
            _row(name, [value], mean_text) for name, value in rewards_of(metrics).items()
        ],
        ("Sampled answers, in %", ""): [_share_row(name, [value]) for name, value in sampled_of(metrics).items()],
        ("Image ablation (shuffled, blank): accuracy in %, of rows with images", "images"): ablation,
        (DEPENDENCE, "images"): [_row(name, [value], mean_text) for name, value in dependence_of(metrics).items()],
    }
    return RunSummary(
        headline=(_accuracy_stat("accuracy", metrics.accuracy),),
        tables=tuple(
            FigureTable(title=title, first=first, columns=("",), rows=tuple(rows))
            for (title, first), rows in tables.items()
            if rows
        ),
    )


def rewards_of(each: TargetMetrics | Figures) -> Mapping[str, Estimate]:
    """The mean reward and its named parts; empty if no reward was recorded."""
    return {"reward": each.reward, **each.parts} if each.reward else {}


def sampled_of(each: TargetMetrics) -> Mapping[str, Cell]:
    """pass@k and the accuracy of the majority vote; empty without sampled answers."""
    if not each.pass_at:
        return {}
    majority = {f"majority of {max(each.pass_at)}": each.majority}
    return {f"pass@{k}": value for k, value in each.pass_at.items()} | majority


def image_ablation_of(each: TargetMetrics) -> Mapping[str, Cell]:
    """Accuracies with true, shuffled and blank images, and the losses in accuracy; empty without an image ablation."""
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


def dependence_of(each: TargetMetrics) -> Mapping[str, Estimate]:
    """How much likelier answers are with true than with shuffled or blank images; empty without an image ablation."""
    found = each.picture_dependence
    return {"true against shuffled": found.shuffled, "true against blank": found.blank} if found else {}


def _accuracy_stat(label: str, value: Estimate) -> Stat:
    return Stat(
        label=label, value=f"{percent(value.mean)} %", note=f"95 % interval {format_interval((value.low, value.high))}"
    )


def _label(summary: SummaryJson, stage: Stage) -> str:
    before = "before warm-up" if summary["accuracy"]["warmup"] is not None else "before RL"
    return {"before": before, "warmup": "after warm-up", "final": "after RL"}[stage]


def _rewards_so_far(curves: Curves) -> tuple[Stat, ...]:
    rewards = curves.finite("reward")
    if not len(rewards):
        return ()
    tenth = math.ceil(len(rewards) / 10)
    note = f"mean of {tenth} step{'s' if tenth > 1 else ''}"
    return (
        Stat(label="reward at the start", value=f"{rewards[:tenth].mean():.3f}", note=note),
        Stat(label="reward now", value=f"{rewards[-tenth:].mean():.3f}", note=note),
    )


def accuracy_table(summary: SummaryJson) -> FigureTable:
    """Accuracy at every stage: by question type, over all rows, and by image type."""
    stages = [stage for stage in STAGES if accuracy_at(summary, stage)]
    kinds = [by_type_at(summary, stage) for stage in stages]
    names = list(kinds[-1]) if len(kinds[-1]) > 1 else []
    rows = [_share_row(name, [of.get(name) for of in kinds]) for name in names]
    rows.append(_share_row("all", [accuracy_at(summary, stage) for stage in stages]))
    images = [figures.by_image_type for figures in stages_on_test(summary).values()]
    rows += [_share_row(f"images: {name}", [of.get(name) for of in images]) for name in (images[-1] if images else ())]
    columns = tuple(_label(summary, stage) for stage in stages)
    title = "Accuracy on held-out rows in %, with 95 % intervals"
    return FigureTable(title=title, first="question type", columns=columns, rows=tuple(rows))


def reward_tables(summary: SummaryJson) -> list[FigureTable]:
    """The mean reward and its parts on the test rows at every stage; no table if no reward was recorded."""
    stages = stages_on_test(summary)
    means = list(map(rewards_of, stages.values()))
    labels = shown_once(means) if means else {}
    rows = tuple(_row(label, [of.get(name) for of in means], mean_text) for name, label in labels.items())
    title = "Reward and its parts on held-out rows, with 95 % intervals"
    return [FigureTable(title=title, first="mean of", columns=tuple(stages), rows=rows)] if rows else []


def _row(name: str, values: Sequence[Cell], text: Callable[[Cell], str]) -> FigureRow:
    last = values[-1]
    return FigureRow(name=name, texts=tuple(map(text, values)), n=last.n if last else 0)


def _share_row(name: str, values: Sequence[Cell]) -> FigureRow:
    """A line of shares in percent; the bar is the interval of the last share."""
    row = _row(name, values, percent_text)
    last, before = values[-1], next((value for value in values[-2::-1] if value), None)
    if not isinstance(last, Estimate) or not math.isfinite(last.low + last.mean + last.high):
        return row
    return FigureRow(
        name=name,
        texts=row.texts,
        n=row.n,
        bar=(last.low, last.mean, last.high),
        before=before.mean if before and math.isfinite(before.mean) else None,
    )


def _controls_note(summary: SummaryJson) -> str:
    images = {"another question's image": summary["shuffled_images"], "a blank one": summary["blank_images"]}
    shares = [f"{percent(value)} % right with {name}" for name, value in images.items() if value is not None]
    return f"The trained model gets {' and '.join(shares)}, using only the text of the question." if shares else ""


def _phases(curves: Curves) -> FigureTable:
    """Total time of each phase, longest first; the part of `seconds/step` outside all phases is "other"."""
    prefix = "seconds/"
    names = [name.removeprefix(prefix) for name in curves.names if name.startswith(prefix)]
    counted = [name for name in names if name not in BESIDE_STEPS]
    totals = {name: float(curves.finite(f"{prefix}{name}").sum()) for name in counted}
    step = totals.pop("step", 0.0)
    named = sum(totals.values())
    if step > named:
        totals["other"] = step - named
    whole = max(step, named)
    rows = tuple(
        FigureRow(
            name=name,
            texts=(f"{s:,.1f}", f"{1000 * s / curves.num_steps:,.1f}", f"{percent(s / whole)} %"),
            bar=(0.0, s / whole, s / whole),
        )
        for name, s in sorted(totals.items(), key=lambda pair: -pair[1])
        if whole
    )
    return FigureTable(title="Time of the steps", first="phase", columns=("total s", "ms per step", "share"), rows=rows)


def _machine(curves: Curves) -> tuple[Stat, ...]:
    """Peak memory; throughput and answer length are means over the last tenth of the steps."""
    peaks = {
        "memory/peak_rss_gib": "peak memory",
        "memory/step_gib": "memory of a step, on the GPU where there is one",
        "memory/learners_peak_gib": "peak memory of a learner's process, on its GPU where it has one",
    }
    rates = {"tokens_per_second": "tokens/s", "response_tokens_mean": "tokens per answer"}
    stats = [
        Stat(label=label, value=f"{values.max():.2f} GiB")
        for key, label in peaks.items()
        if len(values := curves.finite(key))
    ]
    stats += [
        Stat(label=label, value=_count(float(np.mean(values))), note="in the last tenth of steps")
        for key, label in rates.items()
        if len(values := curves.finite(key, last=math.ceil(curves.num_steps / 10)))
    ]
    return tuple(stats)


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
