"""The progress of a run: a live display in a terminal or a notebook, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Columns
from rich.spinner import Spinner
from rich.text import Text

from fovea.metrics.console_file import ConsoleFile
from fovea.metrics.notebook import NotebookDisplay, notebook_publisher
from fovea.utils.shown_text import printable, without_secrets

LINE_EVERY_S = 5.0
LINES_PER_RUN = 10
"""Smallest number of plain lines in a run, for runs too fast for one every LINE_EVERY_S."""
SMOOTHING = 0.1
"""Weight of the newest step in the moving average of the seconds per step."""


class Progress:
    """A context manager around a run: `with Progress(...) as progress: progress.step(1, metrics)`.

    With `enabled=False` nothing is printed, not even by `print`, but for the lines of `warn`, which then go to stderr.
    `transcript` is a file that gets the plain lines in any case. `clock` returns seconds.
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
        self._file_lines = None if self._file is None else _PlainLines(self._file, clock, total_steps)
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
        self._lines = _PlainLines(self._console, clock, total_steps)
        publisher = notebook_publisher() if enabled and console is None else None
        self._notebook = NotebookDisplay(publisher, total_steps, clock) if publisher else None
        self._live: Live | None = None
        if enabled and self._console.is_interactive:
            self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=4)

    def stage(self, text: str) -> None:
        """Show work before, between or after the steps by a text such as `warm-up 125/800  loss 0.41`."""
        text = printable(without_secrets(text))
        self._stage = Spinner("dots", Text(text))
        if self._file_lines:
            self._file_lines.stage(text)
        if self._notebook:
            self._notebook.stage(text)
        elif not self._live:
            self._lines.stage(text)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a finished step, counted from 1, and its metrics."""
        self._step, self._stage = step, None
        self._figures = self._figures | _figures(metrics)
        self._step_seconds = _smooth(self._step_seconds, metrics.get("seconds/step"))
        self._bar.update(self._steps, completed=step, time_left=self._time_left())
        line = f"step {self._count()}  {self._figures_line()}  {self._time_left()}"
        if self._file_lines:
            self._file_lines.step(step, line)
        if self._notebook:
            self._notebook.step(step, metrics, self._figures, self._time_left())
        elif not self._live:
            self._lines.step(step, line)

    def print(self, renderable: RenderableType) -> None:
        """Print above the live display; a string as it is, without rich's markup or line breaks."""
        is_line = isinstance(renderable, str)
        shown = Text(printable(without_secrets(renderable))) if isinstance(renderable, str) else renderable
        self._console.print(shown, soft_wrap=is_line)
        if self._file:
            self._file.print(shown, soft_wrap=is_line)

    def warn(self, text: str) -> None:
        """Print a line on what a run did in place of what was asked for, whether there is a display or not."""
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
        # rich's own estimate would count evaluations and checkpoints as steps, and has none after the first step
        if self._step_seconds is None:
            return ""
        return f"{_duration(self._step_seconds * (self._total_steps - self._step))} left"


class _Prints(Protocol):
    """A console or a file."""

    def print(self, renderable: RenderableType, /, *, soft_wrap: bool | None = None) -> None: ...


class _PlainLines:
    """The stages and steps that get a line of their own where there is no live display."""

    def __init__(self, console: _Prints, clock: Callable[[], float], total_steps: int) -> None:
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


def _figures(metrics: Mapping[str, float]) -> dict[str, str]:
    """Formatted figures of a step by metric name, those among its metrics."""
    formats: dict[str, Callable[[float], str]] = {
        "reward": lambda value: f"reward {value:.3f}",
        "groups/without_signal_frac": lambda value: f"signal {1 - value:.0%}",
        "accuracy": lambda value: f"accuracy {value:.3f}",
        "accuracy/dev": lambda value: f"dev {value:.3f}",
        "response_tokens_mean": lambda value: f"length {value:.1f}",
        "tokens_per_second": lambda value: f"{value:,.0f} tok/s",
    }
    return {key: show(metrics[key]) for key, show in formats.items() if key in metrics}


def _smooth(average: float | None, value: float | None) -> float | None:
    if average is None or value is None:
        return value if average is None else average
    return average + SMOOTHING * (value - average)


def _duration(seconds: float) -> str:
    """Seconds as `2:05` or `1:02:05`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
