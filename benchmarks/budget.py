"""A benchmark that must end in time: each part has a share of it, and says what it left out."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

Clock = Callable[[], float]


class Deadline:
    """When a part has to end."""

    def __init__(self, ends: float, clock: Clock) -> None:
        self._ends = ends
        self._clock = clock

    @property
    def seconds_left(self) -> float:
        return self._ends - self._clock()

    def allows(self, what: str, seconds: float) -> bool:
        """Whether there is time for something that takes about so long; says so if not."""
        if self.seconds_left >= seconds:
            return True
        print(f"skipped: {what} (would take about {seconds:.0f} s, {max(self.seconds_left, 0):.0f} s are left)")
        return False


class Budget:
    """Seconds of a whole program. What a part does not use is there for those after it."""

    def __init__(self, seconds: float, clock: Clock = perf_counter) -> None:
        self._clock = clock
        self._planned_end = clock()
        self._seconds = seconds

    def part(self, share: float) -> Deadline:
        """The next part, with its share of the whole."""
        self._planned_end += share * self._seconds
        return Deadline(self._planned_end, self._clock)
