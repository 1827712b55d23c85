"""The end of a run before its last step: by a signal, or by the time limit of the settings (`max_hours`).

During a step the first SIGTERM (Slurm, Kubernetes, spot machines), SIGINT (Ctrl-C) or SIGHUP (a closed terminal) waits:
the step is finished and saved, then the run ends with exit code 128 + the signal's number (143, 130, 129). A second
one, or one outside the steps, where nothing is to be saved, ends the run at once. The time limit is looked at after
each step, where it acts as a signal does, with exit code 0. Worker processes ignore these signals: they end when the
driver hangs up.
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
"""The same of a run that was ended on its way."""
SAME_SIGNAL_SECONDS = 0.2
"""A signal of torchrun's end that comes again within this time is the same one, delivered twice."""
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(slots=True)
class Stop:
    """True if the run is to end after the running step, and the end itself."""

    max_hours: float | None = None
    started: float = field(default_factory=perf_counter)
    """`perf_counter` from which the hours are counted."""
    received: signal.Signals | None = None
    _received_at: float = 0.0
    _in_steps: bool = False

    @property
    def reason(self) -> str:
        """The signal that came, or the limit that was reached; empty while the run goes on."""
        if self.received is not None:
            return self.received.name
        over = self.max_hours is not None and perf_counter() - self.started >= self.max_hours * 3600
        return f"max_hours={self.max_hours:g} is reached" if over else ""

    def end(self) -> NoReturn:
        """End a saved run: KeyboardInterrupt for SIGINT, else SystemExit, with code 0 where the time is over."""
        if self.received is None:
            raise SystemExit(0)
        _end(self.received, SAVED)

    @contextmanager
    def after_step(self) -> Iterator[None]:
        """Context of the steps: a first signal is noted until the running step ends; it ends the run with the block."""
        self._in_steps = True
        try:
            yield
        finally:
            self._in_steps = False
        if self.received is not None:
            _end(self.received, RESUMABLE)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Context of the end of a run that is saved: within the steps too, a signal ends it there and then."""
        before, self._in_steps = self._in_steps, False
        try:
            yield
        finally:
            self._in_steps = before

    def receive(self, number: int, _frame: FrameType | None) -> None:
        """Handle a signal."""
        is_new = perf_counter() - self._received_at > SAME_SIGNAL_SECONDS or not is_of_torchrun()
        if number == self.received and not is_new:
            return  # the kernel tells the end of torchrun to several threads
        if not self._in_steps or self.received is not None:
            _end(signal.Signals(number), RESUMABLE)
        self.received, self._received_at = signal.Signals(number), perf_counter()
        _write(f"{self.received.name}: the run ends after this step, once it is saved; a second signal ends it at once")


@contextmanager
def ending_signals(stop: Stop) -> Iterator[Stop]:
    """Handle the signals that end a run within the block."""
    # only the main thread may handle signals; in another one they are its caller's business
    in_main = threading.current_thread() is threading.main_thread()
    with handling(dict.fromkeys(ENDING, stop.receive) if in_main else {}):
        yield stop


@contextmanager
def handling(handlers: Mapping[signal.Signals, Callable[[int, FrameType | None], None]]) -> Iterator[None]:
    """Handle signals within the block, but for those that are ignored, as SIGHUP under nohup, or handled already."""
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
    # of all exceptions, asyncio lets only these two pass from every place
    if by is signal.SIGINT:
        raise KeyboardInterrupt(reason)
    raise SystemExit(128 + by)


def _write(line: str) -> None:
    # not print: a handler may run amid a print of the program, whose buffer does not take another one
    with suppress(OSError):
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"\n{line}\n".encode())


def too_few_rows(num_rows: int, config: Config) -> str | None:
    """A warning where a step draws more prompts than there are training rows; None where it does not."""
    wanted, epochs = config.rollout.prompts_per_step, config.max_epochs
    if wanted <= num_rows:
        return None
    times = -(-wanted // num_rows) if epochs is None else min(-(-wanted // num_rows), epochs)
    effect = f"rows repeat {times} times in one step" if times > 1 else "a step takes each of them once"
    return (
        f"rollout.prompts_per_step={wanted} is more than the {num_rows} training rows, so {effect}; lower it to "
        f"{num_rows} or less, and raise rollout.samples_per_prompt for more answers to each row"
    )
