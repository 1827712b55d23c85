"""The progress of a run: a live display in a terminal or a notebook, plain lines elsewhere and in console.txt."""

from __future__ import annotations

import html
import io
import math
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Columns
from rich.spinner import Spinner
from rich.text import Text

from fovea_gym.utils.bounded import append_to
from fovea_gym.utils.shown_text import printable, without_secrets

UPDATE_EVERY_S = 0.5
"""Shortest time between two updates, each of which a front end has to draw."""
MAX_POINTS = 300
"""Largest number of points in the curve; longer runs keep every second, fourth, ... step."""
WIDTH_PX, HEIGHT_PX = 420, 90
CURVE = "reward"


class Publisher(Protocol):
    """Shows or updates an output in a notebook, as `display_pub` of an IPython shell does."""

    def publish(
        self, data: Mapping[str, str], *, transient: Mapping[str, str] | None = None, update: bool = False
    ) -> None: ...


def notebook_publisher() -> Publisher | None:
    """The publisher of the notebook whose kernel is this process; None in all other processes."""
    ipython: Any = sys.modules.get("IPython")  # a kernel has already imported it
    shell = ipython.get_ipython() if ipython is not None else None
    publisher: Publisher | None = getattr(shell, "display_pub", None) if hasattr(shell, "kernel") else None
    return publisher


class NotebookDisplay:
    """An output of a notebook cell with the step, its figures, the time left and the reward curve."""

    def __init__(self, publisher: Publisher, total_steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._publisher, self._total_steps, self._clock = publisher, total_steps, clock
        self._id: str | None = None
        self._shown_at = -math.inf
        self._stage, self._step, self._time_left = "", 0, ""
        self._figures: Mapping[str, str] = {}
        self._points: list[tuple[int, float]] = []
        self._stride = 1

    def stage(self, text: str) -> None:
        """Show what the run does before, between or after the steps."""
        self._stage = text
        self._show()

    def step(self, step: int, metrics: Mapping[str, float], figures: Mapping[str, str], time_left: str) -> None:
        """Show the formatted figures of a finished step, and its reward in the curve."""
        self._stage, self._step, self._figures, self._time_left = "", step, figures, time_left
        reward = metrics.get(CURVE, math.nan)
        if step % self._stride == 0 and math.isfinite(reward):
            self._points.append((step, reward))
        if len(self._points) > MAX_POINTS:
            self._stride *= 2
            self._points = [point for point in self._points if point[0] % self._stride == 0]
        self._show()

    def close(self) -> None:
        """Show the final state."""
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
        """The reward of each step as an SVG line, with its lowest and highest value; empty before the second step."""
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


CONSOLE_FILE = "console.txt"
FILE_WIDTH = 110
"""Width of a table in characters; other lines are not broken."""


class ConsoleFile:
    """Appends printed text to a file, which is open only while it writes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # in a notebook rich would show an empty output for each line as well
        self._console = Console(file=io.StringIO(), width=FILE_WIDTH, force_jupyter=False)

    def print(self, renderable: RenderableType, /, *, soft_wrap: bool | None = None) -> None:
        """Append text or a table."""
        with self._console.capture() as captured:
            self._console.print(renderable, soft_wrap=soft_wrap)
        # this is only a copy of what the terminal shows; on a full disk, writing metrics.jsonl ends the run with an
        # error
        with suppress(OSError), append_to(self._path) as file:
            file.write(captured.get().encode("utf-8", "replace").decode("utf-8"))


LINE_EVERY_S = 5.0
LINES_PER_RUN = 10
"""Smallest number of plain lines in a run that is too fast for a line every LINE_EVERY_S."""
SMOOTHING = 0.1
"""Weight of the newest step in the moving average of the seconds per step."""


class Progress:
    """A context manager around a run: `with Progress(...) as progress: progress.step(1, metrics)`.

    With `enabled=False` nothing is printed, not even by `print`, except the lines of `warn`, which then go to stderr.
    `transcript` is a file that always gets the plain lines. `clock` returns seconds.
    """

    def __init__(
        self,
        total_steps: int,
        start_step: int,
        enabled: bool,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
        transcript: Path | None = None,
    ) -> None:
        self._console = Console(quiet=True) if not enabled else console or Console()
        self._file = None if transcript is None else ConsoleFile(transcript)
        self._total_steps = total_steps
        self._step = start_step
        self._stage: Spinner | None = None
        self._figures: dict[str, str] = {}
        self._bar = Columns(
            TextColumn("step {task.completed:,}/{task.total:,}"),
            BarColumn(bar_width=None, complete_style="cyan"),
            TextColumn("{task.fields[time_left]}"),
            console=self._console,
            expand=True,
        )
        self._steps = self._bar.add_task("", total=total_steps, completed=start_step, time_left="")
        self._step_seconds: float | None = None
        publisher = notebook_publisher() if enabled and console is None else None
        self._notebook = NotebookDisplay(publisher, total_steps, clock) if publisher else None
        self._live: Live | None = None
        if enabled and self._console.is_interactive:
            self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=4)
        plain = (self._file, None if self._notebook or self._live else self._console)
        self._plain = [_PlainLines(each, clock, total_steps) for each in plain if each is not None]

    def stage(self, text: str) -> None:
        """Show what the run does before, between or after steps, by a text such as `warm-up 125/800  loss 0.41`."""
        text = printable(without_secrets(text))
        self._stage = Spinner("dots", Text(text))
        for lines in self._plain:
            lines.stage(text)
        if self._notebook:
            self._notebook.stage(text)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a finished step, counted from 1, and its metrics."""
        self._step, self._stage = step, None
        self._figures = self._figures | _figures(step, metrics)
        if (seconds := metrics.get("seconds/step")) is not None:
            average = seconds if self._step_seconds is None else self._step_seconds
            self._step_seconds = average + SMOOTHING * (seconds - average)
        self._bar.update(self._steps, completed=step, time_left=self._time_left())
        line = f"step {self._count()}  {self._figures_line()}  {self._time_left()}"
        for lines in self._plain:
            lines.step(step, line)
        if self._notebook:
            self._notebook.step(step, metrics, self._figures, self._time_left())

    def print(self, renderable: RenderableType) -> None:
        """Print above the live display; a string is printed unchanged, without rich's markup or line breaks."""
        is_line = isinstance(renderable, str)
        shown = Text(printable(without_secrets(renderable))) if isinstance(renderable, str) else renderable
        self._console.print(shown, soft_wrap=is_line)
        if self._file:
            self._file.print(shown, soft_wrap=is_line)

    def warn(self, text: str) -> None:
        """Print a line about something that a run did differently than asked, whether there is a display or not."""
        self.print(text)
        if self._console.quiet:
            print(printable(without_secrets(text)), file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, _type: type[BaseException] | None, error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        self._stage = None
        if self._file and error is not None:
            text = f"ended by {type(error).__name__}: {error}"
            self._file.print(Text(printable(without_secrets(text))), soft_wrap=True)
        if self._live:
            self._live.stop()
        if self._notebook:
            self._notebook.close()

    def _render(self) -> RenderableType:
        lines: list[RenderableType] = []
        if self._figures:
            lines += [self._bar, Text(self._figures_line(), style="dim")]
        if self._stage:
            lines.append(self._stage)
        return Group(*lines)

    def _count(self) -> str:
        return f"{self._step:,}/{self._total_steps:,}"

    def _figures_line(self) -> str:
        return "  ".join(self._figures.values())

    def _time_left(self) -> str:
        # rich's own estimate would include evaluations and checkpoints, and is not available after the first step
        if self._step_seconds is None:
            return ""
        return f"{_duration(self._step_seconds * (self._total_steps - self._step))} left"


class _PlainLines:
    """Prints some of the stages and steps as separate lines, where there is no live display."""

    def __init__(self, console: Console | ConsoleFile, clock: Callable[[], float], total_steps: int) -> None:
        self._console = console
        self._clock = clock
        self._total_steps = total_steps
        self._last_s: float | None = None
        self._last_word = ""
        self._next_step = 0

    def stage(self, text: str) -> None:
        word = text.split(maxsplit=1)[0] if text else ""
        if word != self._last_word or self._is_late():
            self._print(text)
        self._last_word = word

    def step(self, step: int, text: str) -> None:
        if step >= min(self._next_step, self._total_steps) or self._is_late():
            self._next_step = step + max(1, self._total_steps // LINES_PER_RUN)
            self._print(text)

    def _is_late(self) -> bool:
        return self._last_s is None or self._clock() - self._last_s >= LINE_EVERY_S

    def _print(self, text: str) -> None:
        self._last_s = self._clock()
        self._console.print(Text(text.rstrip()), soft_wrap=True)


def _figures(step: int, metrics: Mapping[str, float]) -> dict[str, str]:
    """Formatted figures of a step by metric name; dev accuracy shows its step, since it stays until the next one."""
    formats: dict[str, Callable[[float], str]] = {
        "reward": lambda value: f"reward {value:.3f}",
        "groups/without_signal_frac": lambda value: f"signal {1 - value:.0%}",
        "accuracy": lambda value: f"accuracy {value:.3f}",
        "accuracy/dev": lambda value: f"dev {value:.3f} (step {step:,})",
        "response_tokens_mean": lambda value: f"length {value:.1f}",
        "tokens_per_second": lambda value: f"{value:,.0f} tok/s",
    }
    return {key: show(metrics[key]) for key, show in formats.items() if key in metrics}


def _duration(seconds: float) -> str:
    """Seconds as `2:05` or `1:02:05`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
