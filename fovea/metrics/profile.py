"""Profiling with `profile=true`: phase times of a few warm steps, then a torch profiler trace of one step.

profile/trace.json.gz opens in chrome://tracing and Perfetto; profile/phases.txt holds the tables. Only one step is
traced, because it has some hundred thousand operators, each of them an event. The tracer slows small operators down.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from torch.profiler import profile

from fovea.metrics.jsonl import BESIDE_STEPS
from fovea.types import Metrics
from fovea_gym.utils.files import write_atomically

PROFILE_FOLDER = "profile"
TRACE_FILE = "trace.json.gz"
PHASES_FILE = "phases.txt"
WARM_STEPS = 3
"""Number of steps skipped at the start of the process, while allocators and caches warm up."""
TIMED_STEPS = 3
TOP_OPERATORS = 20
FILE_WIDTH = 110
# minimum width, because rich wraps a title that is wider than its table
TABLE_WIDTH = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTime:
    """Time and memory of one phase, averaged over the timed steps."""

    name: str
    seconds: float
    share: float
    gib: float | None
    """Memory as defined by `fovea.metrics.log.Phases`; None for the time between phases."""


class StepProfile:
    """Context manager for every step and metric sink, which writes the profile after the traced step."""

    def __init__(
        self, run_dir: Path, *, start_step: int, max_steps: int, say: Callable[[RenderableType], None]
    ) -> None:
        """`start_step` is the first step of this process; the run ends before `max_steps`."""
        self._folder = run_dir / PROFILE_FOLDER
        self._traced = traced_step(start_step, max_steps)
        # a run that is too short for untraced steps reports the phases of the traced one
        self._timed = timed_steps(start_step, self._traced) or [self._traced]
        self._say = say
        self._rows: list[Metrics] = []
        self._operators: Table | None = None
        self._written = False

    @contextmanager
    def __call__(self, step: int) -> Iterator[None]:
        """Context of a step, which runs the profiler if the step is the traced one."""
        if step != self._traced:
            yield
            return
        with profile(acc_events=True) as profiler:
            yield
        self._folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(self._folder / TRACE_FILE))
        self._operators = operator_table(profiler.key_averages())

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Collect the metrics of a finished step (counted from 1 here), and write the files after the traced one."""
        if step - 1 in self._timed:
            self._rows.append(dict(metrics))
        if step - 1 == self._traced:
            assert self._operators is not None, f"step {step} should have been traced"
            tables = (self._phase_table(), self._operators)
            write_atomically(self._folder / PHASES_FILE, as_text(tables).encode())
            self._written = True

    def close(self) -> None:
        """Print the phase table and the paths of the files."""
        if self._written:
            self._say(self._phase_table())
            self._say(f"profile: {self._folder / PHASES_FILE}, {self._folder / TRACE_FILE}")

    def _phase_table(self) -> Table:
        first, last = self._timed[0] + 1, self._timed[-1] + 1
        traced = " (tracer on)" if self._timed == [self._traced] else ""
        steps = f"step {first}" if first == last else f"mean of steps {first} to {last}"
        return phase_table(phase_times(self._rows), title=f"Phases, {steps}{traced}")


def traced_step(start_step: int, max_steps: int) -> int:
    """Index of the step to trace: the first after the warm-up and timed steps, or the last of a shorter run."""
    return min(start_step + WARM_STEPS + TIMED_STEPS, max_steps - 1)


def timed_steps(start_step: int, traced: int) -> list[int]:
    """Indices of the steps to time: up to TIMED_STEPS right before the traced one, never the first of the process."""
    return list(range(max(start_step + 1, traced - TIMED_STEPS), traced))


def phase_times(rows: Sequence[Mapping[str, float]]) -> list[PhaseTime]:
    """Mean phase times, longest first; then the time between phases, and the whole step."""
    seconds = {name: mean for name, mean in _means(rows, "seconds/").items() if name not in BESIDE_STEPS}
    gib = _means(rows, "memory/", "_gib")
    whole = seconds.pop("step")
    # a rollout that is sampled ahead runs during the update; the time that the step waits for it is idle_update
    beside = ("data", "rollout", "idle_rollout") if "idle_update" in seconds else ()
    between = whole - sum(value for name, value in seconds.items() if name not in beside)
    ordered = sorted(seconds.items(), key=lambda item: -item[1])
    return [
        PhaseTime(name=name, seconds=value, share=value / whole, gib=gib.get(name))
        for name, value in [*ordered, ("between", between), ("step", whole)]
    ]


def _means(rows: Sequence[Mapping[str, float]], prefix: str, suffix: str = "") -> dict[str, float]:
    keys = dict.fromkeys(key for row in rows for key in row if key.startswith(prefix) and key.endswith(suffix))
    return {
        key.removeprefix(prefix).removesuffix(suffix): sum(row.get(key, 0.0) for row in rows) / len(rows)
        for key in keys
    }


def phase_table(times: Sequence[PhaseTime], title: str) -> Table:
    """The phase times as a table; the last line is the sum of those above."""
    table = _table(title, "phase", "ms", "share", "GiB")
    for time in times:
        gib = "" if time.gib is None else f"{time.gib:.2f}"
        table.add_row(time.name, f"{1000 * time.seconds:,.1f}", f"{time.share:.1%}", gib)
    return table


def operator_table(events: Sequence[Any]) -> Table:
    """Table of the operators with the largest self time; a phase's entry is its time outside of operators."""
    events = [event for event in events if event.device_type.name == "CPU" or not event.is_user_annotation]
    device_us = sum(event.self_device_time_total for event in events)
    cpu_us = sum(event.self_cpu_time_total for event in events)
    own_us = "self_device_time_total" if device_us > 0 else "self_cpu_time_total"
    events = sorted(events, key=attrgetter(own_us), reverse=True)
    table = _table(f"Operators of one step, tracer on (top {TOP_OPERATORS})", "operator", "calls", "CPU ms", "share")
    if device_us:
        table.add_column("device ms", justify="right")
        table.add_column("share", justify="right")
    for event in events[:TOP_OPERATORS]:
        name = f"{event.key} (outside operators)" if event.is_user_annotation else str(event.key)
        cells = [name, f"{event.count:,}", *_time_cells(event.self_cpu_time_total, cpu_us)]
        table.add_row(*cells, *(_time_cells(event.self_device_time_total, device_us) if device_us else []))
    return table


def as_text(tables: Sequence[Table]) -> str:
    """Tables rendered as plain text."""
    console = Console(file=io.StringIO(), width=FILE_WIDTH, color_system=None)
    with console.capture() as captured:
        for table in tables:
            console.print(table)
    return captured.get()


def _time_cells(own_us: float, all_us: float) -> tuple[str, str]:
    return f"{own_us / 1000:,.1f}", f"{own_us / all_us:.1%}"


def _table(title: str, *headers: str) -> Table:
    table = Table(title=title, title_justify="left", min_width=TABLE_WIDTH)
    for index, header in enumerate(headers):
        table.add_column(header, justify="right" if index else "left")
    return table
