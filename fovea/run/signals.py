"""The end of a run before its last step: by a signal, or by the time limit of the settings (`max_hours`).

During a step the first SIGTERM (Slurm, Kubernetes, spot machines), SIGINT (Ctrl-C) or SIGHUP (a closed terminal) waits:
the step is finished and saved, then the run ends with exit code 128 + the signal's number (143, 130, 129). A second
signal, or a signal outside the steps, where nothing needs saving, ends the run at once. The time limit is checked after
each step, where it acts as a signal does, with exit code 0. Worker processes ignore these signals: they end when the
driver closes its connection.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from time import perf_counter
from types import FrameType
from typing import NoReturn

from fovea.config.run import Config
from fovea.utils.torchrun import is_of_torchrun

SAVED = "the run is saved"
"""Message of the KeyboardInterrupt of a run that has already been saved."""
RESUMABLE = "resume=auto continues from the last checkpoint, if there is one"
"""Message of the exception of a run that was interrupted before it was saved."""
SAME_SIGNAL_SECONDS = 0.2
"""Under torchrun, a signal that repeats within this time is one signal, delivered twice."""
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(slots=True)
class Stop:
    """A request to end the run after the current step, by a signal or the time limit, and how the run then ends."""

    max_hours: float | None = None
    started: float = field(default_factory=perf_counter)
    """`perf_counter` value from which `max_hours` is counted."""
    received: signal.Signals | None = None
    _received_at: float = 0.0
    _in_steps: bool = False

    @property
    def reason(self) -> str:
        """The signal that was received, or the limit that was reached; empty while the run should continue."""
        if self.received is not None:
            return self.received.name
        over = self.max_hours is not None and perf_counter() - self.started >= self.max_hours * 3600
        return f"max_hours={self.max_hours:g} is reached" if over else ""

    def end(self) -> NoReturn:
        """End a saved run: KeyboardInterrupt for SIGINT, else SystemExit, with code 0 for the time limit."""
        if self.received is None:
            raise SystemExit(0)
        _end(self.received, SAVED)

    @contextmanager
    def after_step(self) -> Iterator[None]:
        """Context for the training steps: the first signal is only recorded, and ends the run after the block."""
        self._in_steps = True
        try:
            yield
        finally:
            self._in_steps = False
        if self.received is not None:
            _end(self.received, RESUMABLE)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Context for the end of a run that is already saved: a signal ends it at once, also within `after_step`."""
        before, self._in_steps = self._in_steps, False
        try:
            yield
        finally:
            self._in_steps = before

    def receive(self, number: int, _frame: FrameType | None) -> None:
        """Handle a signal."""
        is_new = perf_counter() - self._received_at > SAME_SIGNAL_SECONDS or not is_of_torchrun()
        if number == self.received and not is_new:
            return  # the kernel reports the end of torchrun to several threads
        if not self._in_steps or self.received is not None:
            _end(signal.Signals(number), RESUMABLE)
        self.received, self._received_at = signal.Signals(number), perf_counter()
        _write(f"{self.received.name}: the run ends after this step, once it is saved; a second signal ends it at once")


@contextmanager
def ending_signals(stop: Stop) -> Iterator[Stop]:
    """Handle the signals that end a run within the block."""
    # only the main thread may handle signals; from another thread, signals are left to the caller
    in_main = threading.current_thread() is threading.main_thread()
    with handling(dict.fromkeys(ENDING, stop.receive) if in_main else {}):
        yield stop


@contextmanager
def handling(handlers: Mapping[signal.Signals, Callable[[int, FrameType | None], None]]) -> Iterator[None]:
    """Handle signals within the block, except signals that are ignored, as SIGHUP under nohup, or already handled."""
    before = {each: signal.getsignal(each) for each in handlers}
    defaults = {each: by for each, by in before.items() if by in (signal.SIG_DFL, signal.default_int_handler)}
    for each in defaults:
        signal.signal(each, handlers[each])
    try:
        yield
    finally:
        for each, handler in defaults.items():
            signal.signal(each, handler)


def _end(by: signal.Signals, reason: str) -> NoReturn:
    # asyncio propagates only these two exceptions from anywhere
    if by is signal.SIGINT:
        raise KeyboardInterrupt(reason)
    raise SystemExit(128 + by)


def _write(line: str) -> None:
    # not print(): a handler may interrupt a print of the program, and the buffer is not reentrant
    with suppress(OSError):
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"\n{line}\n".encode())


def too_few_rows(num_rows: int, config: Config) -> str | None:
    """A warning if a step takes more prompts than there are training rows, else None."""
    wanted, epochs = config.rollout.prompts_per_step, config.max_epochs
    if wanted <= num_rows:
        return None
    times = -(-wanted // num_rows) if epochs is None else min(-(-wanted // num_rows), epochs)
    effect = f"rows repeat {times} times in one step" if times > 1 else "a step takes each of them once"
    return (
        f"rollout.prompts_per_step={wanted} is more than the {num_rows} training rows, so {effect}; lower it to "
        f"{num_rows} or less, and raise rollout.samples_per_prompt for more answers to each row"
    )
