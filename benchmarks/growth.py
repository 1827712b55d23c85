"""Scaling of a step: time and peak memory against each of its sizes, with the other sizes fixed.

    python -m benchmarks.growth --json growth.json --plot docs/growth.png

All points are timed in this process, in turn, with one model; peak memory is measured in a separate process per point.
Times are medians over the steps after one warm-up step, and a line is fitted to them. The floor of one more completion
is its cost with a prompt of only a few tokens: the time of its decoding and training without a prompt to read.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from benchmarks.cases import HEAVY_SIZES, IMAGE_HEAVY, Case, make_parts
from benchmarks.ours import Ours, peak_gib, share
from benchmarks.plots import ACCURACY_COLOUR, REWARD_COLOUR, TEXT_COLOUR, set_title, tidy
from benchmarks.printing import as_table, show
from benchmarks.process import last_number, restart_with_tuned_malloc
from fovea.config.model import TinyModel
from fovea.models.tiny import FIXED

MODULE = "benchmarks.growth"
WARM_STEPS = 1
MEMORY_STEPS = 2
"""Steps taken to measure peak memory: the optimizer has its state from the second step on."""
GOAL = 1.25
"""Goal for the cost of one more completion, as a multiple of its floor."""
BASE = Case(
    model=IMAGE_HEAVY,
    fixed=HEAVY_SIZES,
    vocabulary=16_384,
    image_side_px=448,
    prompts=2,
    samples=8,
    completion_tokens=32,
    question_words=16,
)
QUICK_BASE = replace(BASE, model=TinyModel(), fixed=FIXED, vocabulary=None, image_side_px=48, completion_tokens=16)
WITHOUT_PROMPT = {"images": 0, "question_words": 1}
COMPLETIONS, FLOOR = "completions per prompt", "completions, no prompt"
FLOOR_OF = {COMPLETIONS: FLOOR}
COLUMN_INCHES, ROW_INCHES = 2.6, 2.4
FLOOR_COLOUR = "#808080"


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One size of a step that is varied."""

    name: str
    field: str
    """The field of `Case` that holds this size."""
    values: tuple[int, ...]


AXES = (
    Axis(name=COMPLETIONS, field="samples", values=(2, 4, 8, 16)),
    Axis(name=FLOOR, field="samples", values=(2, 4, 8, 16)),
    Axis(name="prompt tokens", field="question_words", values=(16, 128, 256, 512)),
    Axis(name="completion tokens", field="completion_tokens", values=(8, 16, 32, 64)),
    Axis(name="images per prompt", field="images", values=(1, 2, 3)),
    Axis(name="rows per step", field="prompts", values=(1, 2, 3, 4)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Measurements along one axis, and the line fitted to them."""

    x: list[int]
    seconds: list[float]
    gib: list[float]
    seconds_each: float
    """Slope of the line: seconds per unit of the axis."""
    seconds_at_0: float
    r2: float
    """Coefficient of determination of the line."""
    gib_each: float | None


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parse(arguments)
    torch.set_num_threads(1)
    base = QUICK_BASE if options.quick else BASE
    if options.alone:
        name, value = options.alone.split("=")
        axis = next(axis for axis in AXES if axis.name == name)
        print(peak_gib(_case(base, axis, int(value)), MEMORY_STEPS))
        return
    if arguments is None:
        restart_with_tuned_malloc(MODULE)
    found = measure(base, AXES, steps=options.steps, memory=not options.no_memory, quick=options.quick)
    if options.json:
        Path(options.json).write_text(json.dumps({name: asdict(growth) for name, growth in found.items()}, indent=2))
    if options.plot:
        draw_growth({name: asdict(growth) for name, growth in found.items()}, Path(options.plot), floor_of=FLOOR_OF)
    show(growth_table(found), floor_line(found))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=3, help="number of timed steps at each point")
    parser.add_argument("--quick", action="store_true", help="use the tiny model, to test the program")
    parser.add_argument("--no-memory", action="store_true", help="skip the processes that measure peak memory")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to FILE")
    parser.add_argument("--plot", metavar="FILE", help="also plot the figures to FILE")
    parser.add_argument("--alone", metavar="AXIS=VALUE", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def measure(base: Case, axes: Sequence[Axis], *, steps: int, memory: bool, quick: bool) -> dict[str, Growth]:
    """Measure every axis around the base case."""
    points = {(axis.name, value): _case(base, axis, value) for axis in axes for value in axis.values}
    # one run per distinct case, all with one model: the base case is a point on every axis
    shared = share(base, make_parts(base))
    runs = {case: Ours(case, WARM_STEPS + steps, shared) for case in dict.fromkeys(points.values())}
    seconds = _time_in_turn(runs, steps)
    peaks = _peaks(points, quick=quick) if memory else {}
    return {axis.name: _growth(axis, points, runs, seconds, peaks) for axis in axes}


def _case(base: Case, axis: Axis, value: int) -> Case:
    changes: dict[str, Any] = {axis.field: value}
    if axis.name == FLOOR:
        changes |= WITHOUT_PROMPT
    return replace(base, **changes)


def _time_in_turn(runs: dict[Case, Ours], steps: int) -> dict[Case, float]:
    """Measure the median seconds of a step at every point."""
    times: dict[Case, list[float]] = {case: [] for case in runs}
    for turn in range(WARM_STEPS + steps):
        for case, run in runs.items():
            times[case].append(run.step().step)
        print(f"turn {turn + 1} of {WARM_STEPS + steps}: {sum(t[-1] for t in times.values()):.1f} s", flush=True)
    return {case: median(values[WARM_STEPS:]) for case, values in times.items()}


def _peaks(points: dict[tuple[str, int], Case], *, quick: bool) -> dict[Case, float]:
    peaks: dict[Case, float] = {}
    for (name, value), case in points.items():
        if case not in peaks:
            peaks[case] = last_number(MODULE, *(["--quick"] if quick else []), "--alone", f"{name}={value}")
            print(f"{name} {value}: {peaks[case]:.2f} GiB", flush=True)
    return peaks


def _growth(
    axis: Axis,
    points: dict[tuple[str, int], Case],
    runs: dict[Case, Ours],
    seconds: dict[Case, float],
    peaks: dict[Case, float],
) -> Growth:
    cases = [points[axis.name, value] for value in axis.values]
    # count tokens: a word may be several tokens, and the chat template adds some
    x = [runs[case].prompts(1)[0].num_tokens for case in cases] if axis.field == "question_words" else list(axis.values)
    return growth_of(x, [seconds[case] for case in cases], [peaks[case] for case in cases] if peaks else [])


def growth_of(x: list[int], seconds: list[float], gib: list[float]) -> Growth:
    """Fit a line to the measurements by least squares."""
    each, at_0 = np.polyfit(x, seconds, 1)
    left = np.square(np.polyval([each, at_0], x) - seconds).sum()
    spread = np.square(np.subtract(seconds, np.mean(seconds))).sum()
    return Growth(
        x=x,
        seconds=seconds,
        gib=gib,
        seconds_each=float(each),
        seconds_at_0=float(at_0),
        r2=float(1 - left / spread),
        gib_each=float(np.polyfit(x, gib, 1)[0]) if gib else None,
    )


def growth_table(found: dict[str, Growth]) -> Table:
    """Table of the results, with one row per axis."""
    headers = ("size", "values", "seconds a step", "peak GiB", "ms each", "at 0, s", "r2", "MiB each")
    return as_table("A step against each of its sizes", headers, map(_cells, found, found.values()))


def _cells(name: str, growth: Growth) -> tuple[str, ...]:
    return (
        name,
        " ".join(map(str, growth.x)),
        " ".join(f"{value:.2f}" for value in growth.seconds),
        " ".join(f"{value:.2f}" for value in growth.gib),
        f"{1000 * growth.seconds_each:.2f}",
        f"{growth.seconds_at_0:.2f}",
        f"{growth.r2:.3f}",
        "" if growth.gib_each is None else f"{1024 * growth.gib_each:.1f}",
    )


def floor_line(found: dict[str, Growth]) -> str:
    """A line that compares the cost of one more completion with its floor."""
    whole, floor = found[COMPLETIONS].seconds_each, found[FLOOR].seconds_each
    return (
        f"one more completion of every prompt: {1000 * whole:.1f} ms a step; without a prompt {1000 * floor:.1f} ms; "
        f"{whole / floor:.2f} times its floor (goal: at most {GOAL})"
    )


def draw_growth(found: Mapping[str, Mapping[str, Any]], path: Path, *, floor_of: Mapping[str, str]) -> None:
    """Plot the benchmark's JSON; `floor_of` gives the axis that is plotted as the floor of another axis."""
    names = [name for name in found if name not in floor_of.values()]
    rows = 2 if all(found[name]["gib"] for name in names) else 1
    figure = Figure(figsize=(COLUMN_INCHES * len(names), ROW_INCHES * rows), dpi=160, layout="constrained")
    panels = figure.subplots(rows, len(names), squeeze=False, sharex="col", sharey="row")
    for column, name in enumerate(names):
        time_panel = panels[0, column]
        _draw(time_panel, found[name], "seconds", REWARD_COLOUR)
        if name in floor_of:
            floor = found[floor_of[name]]
            _draw(time_panel, floor, "seconds", FLOOR_COLOUR)
            look: dict[str, Any] = {"textcoords": "offset points", "ha": "right", "fontsize": 8, "color": TEXT_COLOUR}
            time_panel.annotate("without a prompt", (floor["x"][-1], floor["seconds"][-1]), (0, -30), **look)
        each = found[name]["seconds_each"]
        set_title(time_panel, f"{each:.2f} s each" if abs(each) >= 1 else f"{1000 * each:.3g} ms each")
        if rows == 2:
            _draw(panels[1, column], found[name], "gib", ACCURACY_COLOUR)
        panels[-1, column].set_xlabel(name, color=TEXT_COLOUR)
    for row, label in zip(panels[:, 0], ("seconds a step", "peak GiB"), strict=False):
        row.set_ylabel(label, color=TEXT_COLOUR)
    for panel in panels.flat:  # at the end, since setting a limit stops autoscaling
        panel.set_ylim(bottom=0)
        panel.set_xlim(left=0)
    figure.savefig(path, format="png")


def _draw(panel: Axes, growth: Mapping[str, Any], key: str, colour: str) -> None:
    """Plot the points and the line fitted to them."""
    ends = np.array([min(growth["x"]), max(growth["x"])])
    panel.plot(ends, np.polyval(np.polyfit(growth["x"], growth[key], 1), ends), color=colour, linewidth=1.5)
    panel.plot(growth["x"], growth[key], color=colour, marker="o", markersize=4, linestyle="none")
    tidy(panel)


if __name__ == "__main__":
    main()
