"""Order in which the later turns of a rollout go to the engine, and limit of the sessions that are open at once.

The embedded engine on CPUs, in one process or several, is reproducible bit for bit only if its batches always hold the
same requests, because the rounding of a matrix product depends on its number of rows. There, turns wait for each other
(decision 061). On servers and GPUs rounding varies with the load anyway, so they get each turn once its reply arrives.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Protocol, TypeAlias, runtime_checkable

Place: TypeAlias = tuple[int, int]
"""Index of an episode's group in the rollout, and the episode's index in the group."""


@runtime_checkable
class RoundsByLoad(Protocol):
    """An engine whose log-probs may be reproducible bit for bit if it always batches the same requests."""

    @property
    def repeats_in_rounds(self) -> bool:
        """True if the log-probs are reproducible when turns are sent in rounds."""
        ...


class Schedule(Protocol):
    """Decides when an episode may open its session and ask for its next turn."""

    async def begin(self, place: Place) -> None:
        """Wait until the episode may open its session."""
        ...

    async def turn(self, place: Place) -> None:
        """Wait until the episode may ask for its next turn."""
        ...

    def end(self, place: Place) -> None:
        """Remove the episode; call this once for every episode, even if it has not begun."""
        ...


class AsTheyCome:
    """Sends turns to the engine as soon as their replies arrive."""

    def __init__(self, max_open: int) -> None:
        self._free = asyncio.Semaphore(max_open)
        self._open: set[Place] = set()

    async def begin(self, place: Place) -> None:
        await self._free.acquire()
        self._open.add(place)

    async def turn(self, place: Place) -> None:
        """Return at once."""

    def end(self, place: Place) -> None:
        if place in self._open:
            self._open.discard(place)
            self._free.release()


class InRounds:
    """Sends turns to the engine together, in the order of their episodes, once all replies of a round have arrived.

    New episodes also wait for the end of a round, so that nothing depends on which reply arrives first.
    """

    def __init__(self, places: Collection[Place], max_open: int) -> None:
        """`places` holds all episodes; each counts as running until it waits or ends."""
        self._running = set(places)
        self._turns: dict[Place, asyncio.Future[None]] = {}
        self._beginners: dict[Place, asyncio.Future[None]] = {}
        self._open: set[Place] = set()
        self._max_open = max_open

    async def begin(self, place: Place) -> None:
        await self._wait(place, self._beginners)

    async def turn(self, place: Place) -> None:
        await self._wait(place, self._turns)

    def end(self, place: Place) -> None:
        self._open.discard(place)
        self._turns.pop(place, None)
        self._beginners.pop(place, None)
        self._stop_running(place)

    async def _wait(self, place: Place, waiting: dict[Place, asyncio.Future[None]]) -> None:
        waiting[place] = future = asyncio.get_running_loop().create_future()
        self._stop_running(place)
        await future

    def _stop_running(self, place: Place) -> None:
        self._running.discard(place)
        if not self._running:
            # deferred: otherwise the last episode to wait would find its future done and overtake the others
            asyncio.get_running_loop().call_soon(self._next_round)

    def _next_round(self) -> None:
        if self._running:
            return
        beginners = sorted(self._beginners)[: self._max_open - len(self._open)]
        self._open.update(beginners)
        released = [(place, self._turns.pop(place)) for place in sorted(self._turns)]
        released += [(place, self._beginners.pop(place)) for place in beginners]
        self._running.update(place for place, _ in released)
        for _, future in released:
            # a cancelled episode is removed by `end`
            if not future.done():
                future.set_result(None)


def schedule_of(engine: object, places: Collection[Place], max_open: int | None) -> Schedule:
    """Make the schedule for a rollout of these episodes on an engine."""
    limit = max(len(places), 1) if max_open is None else max_open
    if isinstance(engine, RoundsByLoad) and engine.repeats_in_rounds:
        return InRounds(places, limit)
    return AsTheyCome(limit)
