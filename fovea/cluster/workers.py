"""Worker processes as a driver sees them: what each holds, and handles by which it makes calls.

A worker holds a shard of the policy, an engine, or both. Calls of the policy and syncs of weights are collective:
the workers that they concern make them in the same order.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch.distributed as dist

from fovea.errors import LostEngineError, LostRankError, LostWorkerError
from fovea.metrics.log import peak_gib
from fovea.processes.calls import Call
from fovea.rollout.base import Engine, HasProcesses
from fovea.rollout.schedule import RoundsByLoad
from fovea.train.base import ModelFacts
from fovea.train.local import LocalPolicy
from fovea.weights.base import WeightSync
from fovea_gym.errors import FoveaError

CAUSE_SECONDS = 5.0
"""How long the error of a worker that has left a collective call is waited for, where the others' is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """Facts about the services of a worker, for the driver."""

    model: ModelFacts | None
    engine: str | None
    """The name of its engine."""
    repeats_in_rounds: bool = False
    """True if the log-probs of its engine repeat in rounds (`rollout.schedule.RoundsByLoad`)."""
    kernel_notes: tuple[str, ...] = ()
    """Lines on the kernels of its device, to print at the start (`wiring.model.kernel_notes`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """The services of one process."""

    policy: LocalPolicy | None
    engine: Engine | None
    weight_sync: WeightSync
    kernel_notes: tuple[str, ...] = ()

    def describe(self) -> WorkerFacts:
        engine: object = self.engine
        return WorkerFacts(
            model=None if self.policy is None else self.policy.describe(),
            engine=None if self.engine is None else self.engine.name,
            repeats_in_rounds=isinstance(engine, RoundsByLoad) and engine.repeats_in_rounds,
            kernel_notes=self.kernel_notes,
        )

    def peak_gib(self) -> float:
        """Peak memory of this process in GiB, on its GPU where it has one."""
        return peak_gib()

    def check_engine(self) -> None:
        """Raise LostEngineError if a process of the engine's own has ended."""
        engine: object = self.engine
        if isinstance(engine, HasProcesses):
            engine.check_processes()

    async def close(self) -> None:
        """Close the services; the process goes on."""
        if self.engine is not None:
            await self.engine.close()
        if self.policy is not None:
            await self.policy.close()


NOT_COLLECTIVE = ("policy.finish_save", "policy.images_by_rank")


def is_collective(call: Call) -> bool:
    """True if the workers wait for each other in a call, so that an error on one of them is the end of all."""
    return call.method.startswith(("policy.", "weight_sync.")) and call.method not in NOT_COLLECTIVE


async def make_call(call: Call, worker: Worker) -> Any:
    """Make a call in the worker's process."""
    with lost_ranks(call.method):
        return await call.make(worker)


class WorkerHandle(Protocol):
    """The driver's side of a worker."""

    async def start(self, call: Call) -> Awaitable[Any]:
        """Send a call; returns once the worker is sure to receive it, with what awaits its result."""
        ...

    @property
    def rank(self) -> int:
        """Rank of the worker among all of the run."""
        ...

    @property
    def lost(self) -> LostWorkerError | None:
        """The error of a worker whose process has ended, or hung and was killed."""
        ...

    def forget_images(self) -> None:
        """Free the images that calls have brought so far, on both ends; nothing while a collective call runs.

        The answer to `compute_logprobs` names images that it does not bring.
        """
        ...

    @property
    def image_bytes(self) -> int:
        """Bytes of image tensors sent so far."""
        ...

    @property
    def sent_bytes(self) -> int:
        """Bytes of messages sent so far, their images included."""
        ...

    async def close(self) -> None:
        """End the worker."""
        ...


async def call_each(calls: Iterable[tuple[WorkerHandle, Call]]) -> list[Any]:
    """Make calls on several workers at once; returns their results. The first error of any is raised.

    In place of a LostRankError, the error of the worker that was lost, if it arrives soon.
    """
    started = await asyncio.gather(*(handle.start(call) for handle, call in calls))
    answers = [asyncio.ensure_future(answer) for answer in started]
    try:
        return await asyncio.gather(*answers)
    except LostRankError as error:
        await asyncio.wait(answers, timeout=CAUSE_SECONDS)
        errors = [answer.exception() for answer in answers if answer.done() and not answer.cancelled()]
        raise next(
            (each for each in errors if each is not None and not isinstance(each, LostRankError)), error
        ) from None


class LocalHandle:
    """A `WorkerHandle` of the driver's own worker."""

    rank = 0
    lost = None
    image_bytes = 0
    sent_bytes = 0

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def start(self, call: Call) -> Awaitable[Any]:
        return _Unstarted(call, self._worker)

    def forget_images(self) -> None:
        """Do nothing: no image is sent."""

    async def close(self) -> None:
        await self._worker.close()


@dataclass(frozen=True, slots=True, eq=False)
class _Unstarted:
    """A call that begins when it is awaited: one that blocks must not before all other workers have theirs."""

    call: Call
    worker: Worker

    def __await__(self) -> Generator[Any, None, Any]:
        return make_call(self.call, self.worker).__await__()


class Workers:
    """The workers of a run."""

    def __init__(
        self,
        learners: Sequence[WorkerHandle],
        engines: Sequence[WorkerHandle],
        release: Callable[[], None] = lambda: None,
    ) -> None:
        """`learners` by rank; a worker that is in both lists holds a shard of the policy and an engine.

        `release` gives back what the workers ran on, once they are closed.
        """
        self.learners = learners
        self.engines = list(engines)
        """Engines in use; `drop` removes one."""
        self._all = [*learners, *(handle for handle in engines if handle not in learners)]
        self._release = release
        self._measured_bytes = 0
        self._reissued = 0
        self._lost = 0

    @property
    def both(self) -> list[WorkerHandle]:
        """Workers whose engine shares its device with a shard of the policy."""
        return [handle for handle in self.engines if handle in self.learners]

    @property
    def all(self) -> list[WorkerHandle]:
        """All of them but the lost ones."""
        return [*self.learners, *self.engines_only]

    @property
    def engines_only(self) -> list[WorkerHandle]:
        """Workers that hold only an engine."""
        return [handle for handle in self.engines if handle not in self.learners]

    def drop(self, handle: WorkerHandle, error: LostWorkerError | LostEngineError) -> None:
        """Go on without the engine of a worker, which is lost, with only its process or.

        `error` is raised where the run cannot: of a learner, or of the last engine.
        """
        left = [each for each in self.engines if each is not handle]
        if handle in self.learners or not left:
            raise error
        self._lost += len(self.engines) - len(left)
        self.engines = left

    async def drop_ended(self) -> None:
        """Go on without the engines that have ended, also those that had nothing to do."""
        for handle in self.engines_only:
            try:
                await call_each([(handle, Call(method="check_engine"))])
            except (LostWorkerError, LostEngineError) as error:
                self.drop(handle, error)

    def engines_lost(self) -> int:
        """Engines that the run goes on without since the last call."""
        lost, self._lost = self._lost, 0
        return lost

    def note_reissued(self) -> None:
        """Count a request that is made again, since its engine was lost."""
        self._reissued += 1

    def requests_reissued(self) -> int:
        """Requests that were made again since the last call."""
        reissued, self._reissued = self._reissued, 0
        return reissued

    def images_mib(self) -> float:
        """MiB of image tensors sent to other processes since the last call."""
        before = self._measured_bytes
        self._measured_bytes = sum(handle.image_bytes for handle in self._all)
        return (self._measured_bytes - before) / 2**20

    @property
    def sent_bytes(self) -> int:
        """Bytes of messages sent to other processes so far, their images included."""
        return sum(handle.sent_bytes for handle in self._all)

    async def close(self) -> None:
        """End all workers."""
        try:
            await asyncio.gather(*(handle.close() for handle in self._all))
        finally:
            self._release()


_TIMEOUT = re.compile("timed out|timeout", re.IGNORECASE)


@contextmanager
def lost_ranks(call: str) -> Iterator[None]:
    """A call in which LostRankError takes the place of errors of the process group."""
    try:
        yield
    except FoveaError:
        raise
    except RuntimeError as error:
        # gloo has no error type
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        if _TIMEOUT.search(str(error)):
            raise LostRankError(
                f"a collective call in {call} did not end within cluster.collective_timeout_seconds, so a rank is "
                "stuck or lost; start again to continue from the last checkpoint, or raise the setting if calls take "
                "that long"
            ) from error
        raise LostRankError(
            f"another rank has left a collective call in {call}; its error message, if it printed one, is above; "
            "start again to continue from the last checkpoint"
        ) from error
