"""Time budget of a benchmark: each part gets a share, and prints what it skipped."""

from __future__ import annotations

from time import perf_counter

from benchmarks.timing import Clock


class Deadline:
    """Deadline of one part."""

    def __init__(self, ends: float, clock: Clock) -> None:
        self._ends = ends
        self._clock = clock

    @property
    def seconds_left(self) -> float:
        return self._ends - self._clock()

    def allows(self, what: str, seconds: float) -> bool:
        """True if there is time for work of this estimated duration; prints that it is skipped if not."""
        if self.seconds_left >= seconds:
            return True
        print(f"skipped: {what} (would take about {seconds:.0f} s, {max(self.seconds_left, 0):.0f} s are left)")
        return False


class Budget:
    """Time budget of a whole program; what a part leaves goes to those after it."""

    def __init__(self, seconds: float, clock: Clock = perf_counter) -> None:
        self._clock = clock
        self._planned_end = clock()
        self._seconds = seconds

    def part(self, share: float) -> Deadline:
        """Start the next part, with its share of the time."""
        self._planned_end += share * self._seconds
        return Deadline(self._planned_end, self._clock)
