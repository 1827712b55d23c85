"""Step times, their statistics, and the time budget of a program."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

Clock = Callable[[], float]
"""A function that returns the seconds since some fixed moment."""
CLOCKS: Mapping[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}
"""On a machine that other programs also use, CPU time is more reliable than wall time."""

PHASES = ("step", "rollout", "train")
DISTURBED = 0.2
"""Spread above which the second digit of a ratio is not meaningful."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds of one step. `rollout` is from rows to scored completions, `train` is the rest of the step."""

    step: float
    rollout: float
    train: float
    tokens: float
    """Number of completion tokens that were generated and trained on."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each phase of Fovea's step, by the name in `fovea.loop.take_step`."""
    ran_out_of_memory: bool = False
    """True if Fovea halved its micro-batches in this step."""


def medians(steps: Sequence[StepTimes]) -> dict[str, float]:
    """The median seconds of step, rollout and training."""
    return {f"{part}_seconds": median(getattr(times, part) for times in steps) for part in PHASES}


def spread(steps: Sequence[StepTimes]) -> float:
    """The relative spread of the step times: (slowest - fastest) / median."""
    whole = [times.step for times in steps]
    return (max(whole) - min(whole)) / median(whole)


def with_plain_share(times: StepTimes, plain: StepTimes, every_steps: int) -> StepTimes:
    """The times of an average step, if one in `every_steps` steps takes the times of `plain` instead."""
    both = {part: (getattr(times, part), getattr(plain, part)) for part in PHASES}
    return replace(times, **{part: usual + (other - usual) / every_steps for part, (usual, other) in both.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Speedup:
    """How much longer the steps of one side take than the steps of the other; the sides alternate."""

    of_medians: float
    paired: float
    """Median of the ratios of consecutive steps, which other load on the machine disturbs alike."""
    of_best: float
    """Ratio of the fastest steps, which were disturbed least."""

    @staticmethod
    def of(slow: Sequence[float], fast: Sequence[float]) -> Speedup:
        """Compute the speedup of `fast` over `slow`, which have equally many steps."""
        return Speedup(
            of_medians=median(slow) / median(fast),
            paired=median(theirs / ours for theirs, ours in zip(slow, fast, strict=True)),
            of_best=min(slow) / min(fast),
        )


def shown_ratio(ratio: float, spreads: Sequence[float]) -> str:
    """The ratio with two significant digits, or with one if either side's spread is above DISTURBED."""
    digits = 1 if max(spreads) > DISTURBED else 2
    return f"{float(f'{ratio:.{digits}g}'):g}x"


class Deadline:
    """The deadline of one part of a program."""

    def __init__(self, ends: float, clock: Clock) -> None:
        self._ends = ends
        self._clock = clock

    @property
    def seconds_left(self) -> float:
        return self._ends - self._clock()

    def allows(self, what: str, seconds: float) -> bool:
        """True if there is time for work of this estimated duration; otherwise prints that it is skipped."""
        if self.seconds_left >= seconds:
            return True
        print(f"skipped: {what} (would take about {seconds:.0f} s, {max(self.seconds_left, 0):.0f} s are left)")
        return False


class Budget:
    """The time budget of a whole program; time that one part does not use goes to later parts."""

    def __init__(self, seconds: float, clock: Clock = time.perf_counter) -> None:
        self._clock = clock
        self._planned_end = clock()
        self._seconds = seconds
        self._ends = clock() + seconds

    def part(self, share: float) -> Deadline:
        """Start the next part with its full share of the time, even if an earlier part took too long."""
        self._planned_end = min(max(self._planned_end, self._clock()) + share * self._seconds, self._ends)
        return Deadline(self._planned_end, self._clock)
