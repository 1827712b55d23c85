"""Rollouts that are sampled while the policy trains, with bounded staleness, and the weight syncs between them.

The settings decide which version of the weights samples a step, not which side is faster. With a bound of `k` steps,
engines that took version `v` when the policy reached step `v` sample one step after another up to `v + k`; when the
policy reaches step `v + k`, they take its weights and continue:

    k = 2   step in training      0     1     2     3     4
            steps being sampled   0 1 2       3 4         5 6
            sampled by version    0 0 0       2 2         4 4

No step is sampled ahead across a barrier: the end of the run, and the steps after which a checkpoint or a dev
evaluation is due. The newest weights sample the first step after a barrier, as in a run that resumes from that
checkpoint.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from time import perf_counter

from fovea.config.run import Config
from fovea.metrics.log import Phases
from fovea.run.context import Run
from fovea.run.parity import check_sync
from fovea.run.rollout_step import StepRollout, sample_step
from fovea.run.state import Position, position_of, restore_position
from fovea.types import Metrics


class RolloutsAhead:
    """The rollouts of a run in the order of its steps, sampled one after another."""

    def __init__(self, run: Run, step: int) -> None:
        """`step` is the next step; the engines hold the weights of this version."""
        self._run = run
        self._version = step
        self._ahead: dict[int, asyncio.Task[StepRollout | None]] = {}
        """Rollouts that have begun or wait for their turn, by step."""
        self._positions: dict[int, Position] = {}
        """The position of the run before each rollout that has begun and is not taken yet, by step."""
        self._turn = asyncio.Lock()
        self._in_use = BusyTime()
        self._synced: Metrics = {}
        self._step_began = (0.0, 0.0)

    def has_more(self, step: int) -> bool:
        """True if there are rows for this step, which is the next to be taken."""
        return step in self._positions or self._run.stream.has_more

    async def take(self, step: int) -> StepRollout:
        """Wait for the rollout of the policy's current step, and begin the later rollouts that may be sampled now."""
        self._step_began = (perf_counter(), self._in_use.seconds)
        if not self._ahead:
            await self._draw_from(step, version=step)
        with self._run.phases("idle_update"):
            rollout = await self._ahead.pop(step)
        assert rollout is not None, f"step {step} was to be taken, but has no rows"
        del self._positions[step]
        if not self._ahead:
            await self._draw_from(step + 1, version=step)
        return rollout

    async def trained(self, version: int) -> Metrics:
        """Send new weights to the engines if no rollout is ahead; returns metrics of the step's syncs and idle time."""
        if not self._ahead or not self.has_more(version):
            await self._sync(version)
        began, in_use = self._step_began
        synced, self._synced = self._synced, {}
        return synced | {"seconds/idle_rollout": perf_counter() - began - (self._in_use.seconds - in_use)}

    async def put_back(self) -> None:
        """Drop the rollouts that are ahead, and go back to the position of the run before them."""
        await self.close()
        if self._positions:
            restore_position(self._run, self._positions[min(self._positions)])
            self._positions.clear()

    async def close(self) -> None:
        """Cancel the rollouts that are ahead."""
        ahead, self._ahead = list(self._ahead.values()), {}
        for task in ahead:
            task.cancel()
        await asyncio.gather(*ahead, return_exceptions=True)

    async def _draw_from(self, first: int, *, version: int) -> None:
        """Begin the rollouts, from a step on, that the newest weights may sample; they run one after another."""
        config = self._run.config
        last = min(version + config.rollout.max_staleness_steps, next_barrier(config, version) - 1)
        if first <= last:
            await self._sync(version)
        self._ahead = {step: asyncio.create_task(self._draw(step)) for step in range(first, last + 1)}

    async def _draw(self, step: int) -> StepRollout | None:
        """Sample a step when the steps before it are sampled; None if they have left no rows."""
        async with self._turn:  # first come, first served
            if not self._run.stream.has_more:
                return None
            self._positions[step] = position_of(self._run)
            phases = Phases()
            with self._in_use():
                rollout = await sample_step(self._run, step, phases)
            return replace(rollout, metrics=rollout.metrics | phases.seconds() | phases.gib())

    async def _sync(self, version: int) -> None:
        if version != self._version:
            with self._run.phases("weight_sync"), self._in_use():
                report = await self._run.weight_sync.sync(version)
            await check_sync(self._run, report)
            self._version, self._synced = version, report.metrics()


class BusyTime:
    """Measures the total seconds in which something was in use."""

    def __init__(self) -> None:
        self._before = 0.0
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        return self._before + (0.0 if self._since is None else perf_counter() - self._since)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Count the time of the block; blocks must not overlap."""
        self._since = perf_counter()
        try:
            yield
        finally:
            self._before, self._since = self.seconds, None


@asynccontextmanager
async def drawing_ahead(run: Run, step: int) -> AsyncIterator[RolloutsAhead]:
    """Sample rollouts ahead from a step on, whose weights the engines hold; the end of the block cancels them."""
    ahead = RolloutsAhead(run, step)
    try:
        yield ahead
    finally:
        await ahead.close()


def next_barrier(config: Config, step: int) -> int:
    """The first step after this one that may not be sampled ahead."""
    intervals = (config.checkpoint.every_steps, config.evaluate.every_steps)
    return min([config.max_steps, *(step - step % every + every for every in intervals if every)])
