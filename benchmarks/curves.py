"""Held-out accuracy of finished runs against generated tokens, as a figure and a Markdown table.

    python -m benchmarks.curves --out docs/ppo_and_grpo.png GRPO=runs/g0,runs/g1,runs/g2 PPO=runs/p0,runs/p1,runs/p2

Each run needs dev accuracies (evaluate.every_steps) in its metrics.jsonl. One line per run, one colour per name.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import fmean

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from fovea.metrics.log import read_metrics
from fovea.report.curve import ACCURACY_COLOUR, REWARD_COLOUR, TEXT_COLOUR, tidy
from fovea.utils.files import write_atomically

COLOURS = (REWARD_COLOUR, ACCURACY_COLOUR, "#7a5195", "#808080")
WIDTH_INCHES, HEIGHT_INCHES = 6.4, 3.2
ENGINE_GAP = "rollout_train_abs/trained"
TABLE_COLUMNS = 120
"""Characters of a line of the table, so that a file gets it as a terminal does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Dev accuracies of one run."""

    name: str
    folder: Path
    tokens: list[float]
    """Tokens generated until each evaluation."""
    accuracy: list[float]
    entropy: list[float]
    """Entropy of the policy at each evaluation, in nats per token."""
    engine_gap: float
    """Difference of the engine's log-probs from the trainer's, without sign: mean over the steps that have it."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.curves", description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", metavar="NAME=FOLDER,FOLDER", help="run folders of one name")
    parser.add_argument("--out", type=Path, required=True, help="the picture, a PNG")
    parser.add_argument("--entropy", action="store_true", help="a second panel with the policy's entropy")
    options = parser.parse_args(arguments)
    named = [(name, folders.split(",")) for name, _, folders in (word.partition("=") for word in options.runs)]
    curves = [read_curve(name, Path(folder)) for name, folders in named for folder in folders]
    _draw(curves, options.out, with_entropy=options.entropy)
    Console(width=TABLE_COLUMNS).print(_table(curves))


def read_curve(name: str, folder: Path) -> Curve:
    """Read the dev accuracies of a run; ValueError if it has none."""
    rows = read_metrics(folder)
    gaps = [row[ENGINE_GAP] for row in rows if ENGINE_GAP in row]
    # tokens of all scored groups: dynamic sampling generates more than a step trains on
    generated = list(accumulate(row["tokens_per_second"] * row["seconds/step"] for row in rows))
    read = [index for index, row in enumerate(rows) if "accuracy/dev" in row]
    if not read:
        raise ValueError(f"{folder} has no dev accuracies; set evaluate.every_steps")
    return Curve(
        name=name,
        folder=folder,
        tokens=[generated[index] for index in read],
        accuracy=[rows[index]["accuracy/dev"] for index in read],
        entropy=[rows[index].get("entropy", float("nan")) for index in read],
        engine_gap=fmean(gaps) if gaps else float("nan"),
    )


def _draw(curves: Sequence[Curve], path: Path, *, with_entropy: bool) -> None:
    panels_wanted = 2 if with_entropy else 1
    figure = Figure(figsize=(WIDTH_INCHES, HEIGHT_INCHES * panels_wanted), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(panels_wanted, 1, squeeze=False, sharex=True)[:, 0]
    names = list(dict.fromkeys(curve.name for curve in curves))
    drawn: set[str] = set()
    for curve in curves:
        colour, label = COLOURS[names.index(curve.name) % len(COLOURS)], None if curve.name in drawn else curve.name
        thousands = [tokens / 1000 for tokens in curve.tokens]
        panels[0].plot(thousands, curve.accuracy, color=colour, linewidth=1.3, label=label)
        if with_entropy:
            panels[1].plot(thousands, curve.entropy, color=colour, linewidth=1.3)
        drawn.add(curve.name)
    for panel, text in zip(panels, ("held-out accuracy (dev)", "entropy, nats per token"), strict=False):
        tidy(panel)
        panel.set_ylabel(text, color=TEXT_COLOUR)
    # outside of the panels, where it hides no line
    figure.legend(frameon=False, loc="outside upper center", ncols=2, labelcolor=TEXT_COLOUR)
    panels[-1].set_xlabel("thousand tokens generated", color=TEXT_COLOUR)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    write_atomically(path, buffer.getvalue())


def _table(curves: Sequence[Curve]) -> Table:
    table = Table(title="Held-out accuracy (dev)", title_justify="left", box=MARKDOWN)
    for header in ("run", "first", "half way", "best", "last", "last entropy", "engine gap", "tokens"):
        table.add_column(header, justify="left" if header == "run" else "right")
    for curve in curves:
        half = curve.accuracy[len(curve.accuracy) // 2]
        numbers = (curve.accuracy[0], half, max(curve.accuracy), curve.accuracy[-1], curve.entropy[-1])
        cells = [*(f"{x:.3f}" for x in numbers), f"{curve.engine_gap:.1e}", f"{curve.tokens[-1]:,.0f}"]
        table.add_row(f"{curve.name} {curve.folder}", *cells)
    return table


if __name__ == "__main__":
    main()
