"""reward_curve.png: reward and dev accuracy of a run by step."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from fovea.utils.files import write_atomically

CURVE_FILE = "reward_curve.png"
REWARD_COLOUR = "#2b6cb0"
ACCURACY_COLOUR = "#c05621"
TEXT_COLOUR = "#404040"


def draw_curve(metrics: Sequence[Mapping[str, float]], path: Path) -> None:
    """Plot the reward of each step (faint) with its running mean and, below it, dev accuracy where it was evaluated."""
    panels = [key for key in ("reward", "accuracy/dev") if any(key in row for row in metrics)]
    figure = Figure(figsize=(6.4, 1.2 + 2.3 * max(len(panels), 1)), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(max(len(panels), 1), 1, sharex=True, squeeze=False)[:, 0]
    for key, panel in zip(panels, axes, strict=False):
        draw = _draw_reward if key == "reward" else _draw_accuracy
        draw(panel, *_series(metrics, key))
    for panel in axes:
        tidy(panel)
    axes[-1].set_xlim(0, last_step(metrics))
    axes[-1].set_xlabel("step", color=TEXT_COLOUR)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    write_atomically(path, buffer.getvalue())


def running_mean(values: NDArray[np.float64], window: int) -> NDArray[np.float64]:
    """Mean of the last `window` values (fewer at the start), NaN ignored."""
    present = np.isfinite(values)
    sums = np.cumsum(np.where(present, values, 0.0))
    counts = np.cumsum(present)
    sums[window:] -= sums[:-window].copy()
    counts[window:] -= counts[:-window].copy()
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def last_step(metrics: Sequence[Mapping[str, float]]) -> float:
    """The newest step, where the axis of a plot ends; 1 before the first."""
    return max((row["step"] for row in metrics), default=1)


def _series(metrics: Sequence[Mapping[str, float]], key: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    points = [(row["step"], row[key]) for row in metrics if key in row]
    steps, values = np.array(points, dtype=np.float64).T
    return steps, values


def _draw_reward(panel: Axes, steps: NDArray[np.float64], rewards: NDArray[np.float64]) -> None:
    window = int(np.clip(len(rewards) // 25, 1, 50))
    mean, start = running_mean(rewards, window), window // 2  # the first means are over too few steps to show
    label = f"mean of {window} steps" if window > 1 else "each step"
    (line,) = panel.plot(steps[start:], mean[start:], color=REWARD_COLOUR, linewidth=2, markersize=4, label=label)
    if len(rewards) == 1:  # a line of one point is not seen, and the point lies on the edge of the plot
        line.set(marker="o", clip_on=False)
    set_title(panel, "Mean reward of the sampled answers")
    if window > 1:
        panel.plot(steps, rewards, color=REWARD_COLOUR, alpha=0.25, linewidth=0.8, zorder=1, label="each step")
        panel.legend(loc="lower right", frameon=False, fontsize=9, labelcolor=TEXT_COLOUR)


def _draw_accuracy(panel: Axes, steps: NDArray[np.float64], accuracies: NDArray[np.float64]) -> None:
    (line,) = panel.plot(steps, 100 * accuracies, color=ACCURACY_COLOUR, marker="o", markersize=4)
    line.set_clip_on(False)  # the last evaluation lies on the edge of the plot
    set_title(panel, "Accuracy on dev in %, greedy decoding")


def set_title(panel: Axes, text: str) -> None:
    panel.set_title(text, loc="left", fontsize=11, color=TEXT_COLOUR)


def tidy(panel: Axes) -> None:
    panel.spines[["top", "right"]].set_visible(False)
    panel.spines[["left", "bottom"]].set_color("#b0b0b0")
    panel.tick_params(colors=TEXT_COLOUR, labelsize=10)
    panel.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    panel.set_axisbelow(True)
    panel.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
