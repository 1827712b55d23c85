"""Colours and styles of the benchmarks' plots."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

REWARD_COLOUR = "#2b6cb0"
ACCURACY_COLOUR = "#c05621"
TEXT_COLOUR = "#404040"


def set_title(panel: Axes, text: str) -> None:
    panel.set_title(text, loc="left", fontsize=11, color=TEXT_COLOUR)


def tidy(panel: Axes) -> None:
    panel.spines[["top", "right"]].set_visible(False)
    panel.spines[["left", "bottom"]].set_color("#b0b0b0")
    panel.tick_params(colors=TEXT_COLOUR, labelsize=10)
    panel.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    panel.set_axisbelow(True)
    panel.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
