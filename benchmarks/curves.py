"""Held-out accuracy of finished runs against the number of generated tokens, as a figure and a Markdown table.

    python -m benchmarks.curves --out docs/ppo_and_grpo.png GRPO=runs/g0,runs/g1,runs/g2 PPO=runs/p0,runs/p1,runs/p2
    python -m benchmarks.curves --out captions.png --metric dev/reward GRPO=runs/g0   # another figure of dev rows

Each run needs evaluations on the dev rows (evaluate.every_steps) in its metrics.jsonl. Each name has one colour, with a
faint line per run. A strong line shows their mean if all runs of a name were evaluated at the same steps.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.box import MARKDOWN
from rich.console import Console

from benchmarks.plots import ACCURACY_COLOUR, REWARD_COLOUR, TEXT_COLOUR, tidy
from benchmarks.printing import as_table
from fovea.metrics.log import read_metrics

COLOURS = (REWARD_COLOUR, ACCURACY_COLOUR, "#7a5195", "#808080")
WIDTH_INCHES, HEIGHT_INCHES = 6.4, 3.2
ACCURACY, ACCURACY_LABEL = "accuracy/dev", "held-out accuracy (dev)"
ENGINE_GAP = "mismatch_trained/abs"
TABLE_COLUMNS = 120
"""Width of the table in characters, also if the output is a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The evaluations of one run on the dev rows."""

    name: str
    folder: Path
    tokens: list[float]
    """Number of tokens generated up to each evaluation."""
    steps: list[int]
    readings: list[float]
    """The plotted metric at each evaluation."""
    entropy: list[float]
    """The policy's entropy at each evaluation, in nats per token."""
    engine_gap: float
    """Mean absolute difference between the engine's and the trainer's log-probs, over the steps that recorded it."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.curves", description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", metavar="NAME=FOLDER,FOLDER", help="run folders of one name")
    parser.add_argument("--out", type=Path, required=True, help="PNG file to write")
    parser.add_argument(
        "--metric", default=ACCURACY, help="metric of dev rows to plot (python -m fovea.metrics.names lists them)"
    )
    parser.add_argument("--entropy", action="store_true", help="add a second panel with the policy's entropy")
    options = parser.parse_args(arguments)
    named = [(name, folders.split(",")) for name, _, folders in (word.partition("=") for word in options.runs)]
    curves = [read_curve(name, Path(folder), options.metric) for name, folders in named for folder in folders]
    label = ACCURACY_LABEL if options.metric == ACCURACY else options.metric
    _draw(curves, options.out, label, with_entropy=options.entropy)
    headers = ("run", "first", "half way", "best", "last", "last entropy", "engine gap", "tokens")
    table = as_table(label.capitalize(), headers, map(_cells, curves))
    table.box = MARKDOWN
    Console(width=TABLE_COLUMNS).print(table)


def read_curve(name: str, folder: Path, metric: str = ACCURACY) -> Curve:
    """Read a run's evaluations on the dev rows; ValueError if it has none."""
    rows = read_metrics(folder)
    gaps = [row[ENGINE_GAP] for row in rows if ENGINE_GAP in row]
    # count the tokens of all scored groups: dynamic sampling generates more than a step trains on
    generated = list(accumulate(row["tokens_per_second"] * row["seconds/step"] for row in rows))
    read = [index for index, row in enumerate(rows) if metric in row]
    if not read:
        raise ValueError(f"{folder} has no {metric}; set evaluate.every_steps, or choose a metric that the run records")
    return Curve(
        name=name,
        folder=folder,
        tokens=[generated[index] for index in read],
        steps=[int(rows[index]["step"]) for index in read],
        readings=[rows[index][metric] for index in read],
        entropy=[rows[index].get("entropy", float("nan")) for index in read],
        engine_gap=fmean(gaps) if gaps else float("nan"),
    )


def _draw(curves: Sequence[Curve], path: Path, label: str, *, with_entropy: bool) -> None:
    panels_wanted = 2 if with_entropy else 1
    figure = Figure(figsize=(WIDTH_INCHES, HEIGHT_INCHES * panels_wanted), dpi=160, layout="constrained")
    panels = figure.subplots(panels_wanted, 1, squeeze=False, sharex=True)[:, 0]
    for number, name in enumerate(dict.fromkeys(curve.name for curve in curves)):
        mine, colour = [curve for curve in curves if curve.name == name], COLOURS[number % len(COLOURS)]
        panels[0].plot([], [], color=colour, label=name)  # one legend entry per name, not one per line
        draw_name(panels[0], mine, [curve.readings for curve in mine], colour)
        if with_entropy:
            draw_name(panels[1], mine, [curve.entropy for curve in mine], colour)
    for panel, text in zip(panels, (label, "entropy, nats per token"), strict=False):
        tidy(panel)
        panel.set_ylabel(text, color=TEXT_COLOUR)
    # place the legend outside of the panels, where it does not hide lines
    figure.legend(frameon=False, loc="outside upper center", ncols=2, labelcolor=TEXT_COLOUR)
    panels[-1].set_xlabel("thousand tokens generated", color=TEXT_COLOUR)
    figure.savefig(path, format="png")


def draw_name(panel: Axes, curves: Sequence[Curve], values: Sequence[list[float]], colour: str) -> None:
    """Draw the runs of one name; `values` holds each run's values in the order of its evaluations."""
    with_mean = len(curves) > 1 and len({tuple(curve.steps) for curve in curves}) == 1
    for curve, own in zip(curves, values, strict=True):
        width, alpha = (0.9, 0.4) if with_mean else (1.3, 1.0)
        panel.plot([tokens / 1000 for tokens in curve.tokens], own, color=colour, linewidth=width, alpha=alpha)
    if with_mean:
        tokens = [fmean(each) / 1000 for each in zip(*(curve.tokens for curve in curves), strict=True)]
        panel.plot(tokens, [fmean(each) for each in zip(*values, strict=True)], color=colour, linewidth=2.0)


def _cells(curve: Curve) -> list[str]:
    half = curve.readings[len(curve.readings) // 2]
    numbers = (curve.readings[0], half, max(curve.readings), curve.readings[-1], curve.entropy[-1])
    name = f"{curve.name} {curve.folder}"
    return [name, *(f"{x:.3f}" for x in numbers), f"{curve.engine_gap:.1e}", f"{curve.tokens[-1]:,.0f}"]


if __name__ == "__main__":
    main()
