"""Figure of `benchmarks.growth`: seconds above, peak memory below, one column per axis."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.plots import ACCURACY_COLOUR, REWARD_COLOUR, TEXT_COLOUR, set_title, tidy
from fovea.utils.files import write_atomically

COLUMN_INCHES, ROW_INCHES = 2.6, 2.4
FLOOR_COLOUR = "#808080"


def draw_growth(found: Mapping[str, Mapping[str, Any]], path: Path, *, floor_of: Mapping[str, str]) -> None:
    """Plot the JSON of the benchmark; `floor_of` names the axis to plot beneath another as its floor."""
    names = [name for name in found if name not in floor_of.values()]
    rows = 2 if all(found[name]["gib"] for name in names) else 1
    figure = Figure(figsize=(COLUMN_INCHES * len(names), ROW_INCHES * rows), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, len(names), squeeze=False, sharex="col", sharey="row")
    for column, name in enumerate(names):
        time_panel = panels[0, column]
        _draw(time_panel, found[name], "seconds", REWARD_COLOUR)
        if name in floor_of:
            _draw(time_panel, found[floor_of[name]], "seconds", FLOOR_COLOUR)
            _label_floor(time_panel, found[floor_of[name]])
        set_title(time_panel, _each(found[name]["seconds_each"]))
        if rows == 2:
            _draw(panels[1, column], found[name], "gib", ACCURACY_COLOUR)
        panels[-1, column].set_xlabel(name, color=TEXT_COLOUR)
    for row, label in zip(panels[:, 0], ("seconds a step", "peak GiB"), strict=False):
        row.set_ylabel(label, color=TEXT_COLOUR)
    for panel in panels.flat:  # last, since setting a limit ends autoscaling
        panel.set_ylim(bottom=0)
        panel.set_xlim(left=0)
    _finish(figure, path)


def _each(seconds: float) -> str:
    return f"{seconds:.2f} s each" if abs(seconds) >= 1 else f"{1000 * seconds:.3g} ms each"


def _draw(panel: Axes, growth: Mapping[str, Any], key: str, colour: str) -> None:
    """Plot points and the line fitted to them."""
    ends = np.array([min(growth["x"]), max(growth["x"])])
    panel.plot(ends, np.polyval(np.polyfit(growth["x"], growth[key], 1), ends), color=colour, linewidth=1.5)
    panel.plot(growth["x"], growth[key], color=colour, marker="o", markersize=4, linestyle="none")
    tidy(panel)


def _label_floor(panel: Axes, growth: Mapping[str, Any]) -> None:
    end = (growth["x"][-1], growth["seconds"][-1])
    panel.annotate(
        "without a prompt", end, (0, -30), textcoords="offset points", ha="right", fontsize=8, color=TEXT_COLOUR
    )


def _finish(figure: Figure, path: Path) -> None:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    write_atomically(path, buffer.getvalue())
