"""The progress of a run in a notebook: one output that is updated in place, with the curve of the reward."""

from __future__ import annotations

import html
import math
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any, Protocol

UPDATE_EVERY_S = 0.5
"""Shortest time between two updates: a front end draws each of them."""
MAX_POINTS = 300
"""Points of the curve; of longer runs every second, fourth, ... step is kept."""
WIDTH_PX, HEIGHT_PX = 420, 90
CURVE = "reward"
"""The metric whose curve is drawn."""


class Publisher(Protocol):
    """What shows an output in a notebook, or updates it: `display_pub` of an IPython shell."""

    def publish(
        self, data: Mapping[str, str], *, transient: Mapping[str, str] | None = None, update: bool = False
    ) -> None: ...


def notebook_publisher() -> Publisher | None:
    """The publisher of the notebook that this process is the kernel of; None for all other processes."""
    ipython: Any = sys.modules.get("IPython")  # a kernel has imported it
    shell = ipython.get_ipython() if ipython is not None else None
    publisher: Publisher | None = getattr(shell, "display_pub", None) if hasattr(shell, "kernel") else None
    return publisher


class NotebookDisplay:
    """One output of a cell with the step, the figures, the time left and the curve of the reward.

    `clock` returns seconds.
    """

    def __init__(self, publisher: Publisher, total_steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._publisher, self._total_steps, self._clock = publisher, total_steps, clock
        self._id: str | None = None
        self._shown_at = -math.inf
        self._stage, self._step, self._time_left = "", 0, ""
        self._figures: Mapping[str, str] = {}
        self._points: list[tuple[int, float]] = []
        self._stride = 1

    def stage(self, text: str) -> None:
        """Show work before, between or after the steps."""
        self._stage = text
        self._show()

    def step(self, step: int, metrics: Mapping[str, float], figures: Mapping[str, str], time_left: str) -> None:
        """Show a finished step by its formatted figures, and its reward in the curve."""
        self._stage, self._step, self._figures, self._time_left = "", step, figures, time_left
        reward = metrics.get(CURVE, math.nan)
        if step % self._stride == 0 and math.isfinite(reward):
            self._points.append((step, reward))
        if len(self._points) > MAX_POINTS:
            self._stride *= 2
            self._points = [point for point in self._points if point[0] % self._stride == 0]
        self._show()

    def close(self) -> None:
        """Show the last state, without what was going on."""
        self._stage = ""
        self._shown_at = -math.inf
        self._show()

    def _show(self) -> None:
        if self._clock() - self._shown_at < UPDATE_EVERY_S:
            return
        self._shown_at = self._clock()
        is_new, self._id = self._id is None, self._id or uuid.uuid4().hex
        data = {"text/plain": self._plain(), "text/html": self._html()}
        self._publisher.publish(data, transient={"display_id": self._id}, update=not is_new)

    def _plain(self) -> str:
        return "  ".join(filter(None, [self._count(), *self._figures.values(), self._time_left, self._stage]))

    def _html(self) -> str:
        line = "&emsp;".join(html.escape(figure) for figure in (*self._figures.values(), self._time_left) if figure)
        bar = f'<progress style="width: {WIDTH_PX}px" max="{self._total_steps}" value="{self._step}"></progress>'
        parts = [f"{bar} {html.escape(self._count())}", line, self._curve(), f"<i>{html.escape(self._stage)}</i>"]
        return "".join(f"<div>{part}</div>" for part in parts if part and part != "<i></i>")

    def _count(self) -> str:
        return f"step {self._step:,}/{self._total_steps:,}"

    def _curve(self) -> str:
        """The reward of each step as a line of SVG, with its lowest and highest value; empty before the second."""
        if len(self._points) < 2:
            return ""
        steps, rewards = zip(*self._points, strict=True)
        low, high = min(rewards), max(rewards)
        span = (high - low) or 1.0
        places = " ".join(
            f"{WIDTH_PX * (step - steps[0]) / (steps[-1] - steps[0]):.1f},"
            f"{4 + (HEIGHT_PX - 8) * (high - reward) / span:.1f}"
            for step, reward in self._points
        )
        return (
            f'<svg width="{WIDTH_PX}" height="{HEIGHT_PX}" role="img" aria-label="{CURVE} by step" '
            'style="background: color-mix(in srgb, currentColor 6%, transparent)">'
            f'<polyline points="{places}" fill="none" stroke="#2a78d6" stroke-width="1.5"/></svg>'
            f"<br><small>{CURVE}, steps {steps[0]:,} to {steps[-1]:,}: {low:.3g} to {high:.3g}</small>"
        )
