"""Small curves of a run by step: parts of the reward, dev figures, length, entropy, KL, groups with signal."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from fovea.metrics.names import is_rounding
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


MAX_LINES = 8
"""Lines in one panel; a reward function of the user's may have many parts."""
Metrics = Mapping[str, float]

PARTS = ("Parts of the reward", "On dev: reward and parts")
"""Titles of the panels in which a part of the reward has one colour."""
REWARD_LINE: Mapping[str, Any] = {"color": TEXT_COLOUR, "linestyle": (0, (2, 4)), "markersize": 2, "zorder": 3}
"""Dashed and on top: a reward of one part only lies on that part's line."""

PANELS: Mapping[str, tuple[str, ...]] = {
    "Groups with signal, share": ("groups/with_signal_frac",),
    "Tokens per answer": ("response_tokens_mean",),
    "Entropy, nats": ("entropy",),
    "KL to the reference, nats": ("kl/reference", "kl/reward"),
    "KL of engine and trainer, nats": ("rollout_train_kl",),
}


def draw_panels(metrics: Sequence[Metrics]) -> bytes | None:
    """The panels as a PNG file; None where no metric for any of them was written."""
    rows = [_with_signal(row) for row in metrics]
    panels = panels_of(rows)
    if not panels:
        return None
    lines = -(-len(panels) // 2)
    figure = Figure(figsize=(8.4, 0.4 + 2.1 * lines), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(lines, 2, squeeze=False).flat
    colours = part_colours(panels)
    for place, (panel, (title, keys)) in enumerate(zip(axes, panels.items(), strict=False)):
        _draw(panel, title, keys, rows, colours)
        if place + 2 >= len(panels):
            panel.set_xlabel("step", color=TEXT_COLOUR, fontsize=9)
    for panel in axes[len(panels) :]:
        panel.set_visible(False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def panels_of(rows: Sequence[Metrics]) -> dict[str, list[str]]:
    """The panels by title, each with the metrics that it draws; those without any are left out."""
    panels = {title: [key for key in keys if _has(rows, key)] for title, keys in {**_parts(rows), **PANELS}.items()}
    return {title: keys for title, keys in panels.items() if keys}


def part_colours(panels: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """A colour for each part of the reward, the same while training and on dev; the reward itself has none of these."""
    names = dict.fromkeys(_name(key) for title in PARTS for key in panels.get(title, ()))
    return {name: f"C{place % 10}" for place, name in enumerate(name for name in names if name != "reward")}


def _name(key: str) -> str:
    return key.removeprefix("dev/").removeprefix("reward/")


def _parts(rows: Sequence[Metrics]) -> dict[str, tuple[str, ...]]:
    """Panels of the parts of the reward, while training and on dev; distances, which have a unit, apart."""
    named = sorted({key for row in rows for key in row})
    training = [key for key in named if key.startswith("reward/") and key.count("/") == 1]
    dev = [key for key in named if key.startswith("dev/reward")]
    return {
        **dict(zip(PARTS, (_without_km(training), _without_km(dev)), strict=True)),
        "Distance, km": tuple(key for key in (*training, *dev) if key.endswith("_km") and "within" not in key),
    }


def _without_km(keys: Sequence[str]) -> tuple[str, ...]:
    return tuple(key for key in keys if not key.endswith("distance_km"))[:MAX_LINES]


def _with_signal(row: Metrics) -> Metrics:
    silent_frac = row.get("groups/without_signal_frac")
    return row if silent_frac is None else {**row, "groups/with_signal_frac": 1 - silent_frac}


def _has(rows: Sequence[Metrics], key: str) -> bool:
    values = [row[key] for row in rows if key in row]
    return bool(values) and not is_rounding(key, values)


def _draw(panel: Axes, title: str, keys: Sequence[str], rows: Sequence[Metrics], colours: Mapping[str, str]) -> None:
    for place, key in enumerate(keys):
        steps, values = np.array([(row["step"], row[key]) for row in rows if key in row], dtype=np.float64).T
        window = int(np.clip(len(values) // 25, 1, 50))
        colour = colours.get(_name(key), f"C{place}") if title in PARTS else f"C{place}"
        line = REWARD_LINE if key == "dev/reward" else {"color": colour, "markersize": 3.5}
        marker = "o" if len(values) < 30 else None
        mean = running_mean(values, window)
        # the newest value lies on the edge of the plot
        panel.plot(steps, mean, **line, linewidth=1.6, marker=marker, clip_on=marker is None, label=_label(key, title))
    panel.set_xlim(0, last_step(rows))
    set_title(panel, title)
    tidy(panel)
    if len(keys) > 1:
        for text in panel.legend(frameon=False, fontsize=7).get_texts():
            text.set_parse_math(False)  # names of the user's parts, in which a $ begins no formula


def _label(key: str, title: str) -> str:
    """The name of a line; a panel of training and dev together tells them apart."""
    return _name(key) if title in PARTS or not key.startswith("dev/") else f"{_name(key)} on dev"
