"""Worker processes from the driver's point of view: their services, and the handles for calling them.

A worker holds a shard of the policy, an engine, or both. Calls of the policy and weight syncs are collective: all
workers that take part make them in the same order.
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
"""Longest wait for the error of the worker that left a collective call, once the errors of other workers are known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """Facts about the services of a worker, for the driver."""

    model: ModelFacts | None
    engine: str | None
    """Name of the worker's engine."""
    repeats_in_rounds: bool = False
    """True if the log-probs of the engine repeat in rounds (`rollout.schedule.RoundsByLoad`)."""
    kernel_notes: tuple[str, ...] = ()
    """Lines about the kernels on the worker's device, to print at the start (`wiring.model.kernel_notes`)."""


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
        """Peak memory of this process in GiB, on its GPU if it has one."""
        return peak_gib()

    def check_engine(self) -> None:
        """Raise LostEngineError if a process of the engine has ended."""
        engine: object = self.engine
        if isinstance(engine, HasProcesses):
            engine.check_processes()

    async def close(self) -> None:
        """Close the services; the process keeps running."""
        if self.engine is not None:
            await self.engine.close()
        if self.policy is not None:
            await self.policy.close()


NOT_COLLECTIVE = ("policy.finish_save", "policy.images_by_rank")


def is_collective(call: Call) -> bool:
    """True if the workers wait for each other in a call, so that an error on one of them ends all."""
    return call.method.startswith(("policy.", "weight_sync.")) and call.method not in NOT_COLLECTIVE


async def make_call(call: Call, worker: Worker) -> Any:
    """Make a call in the worker's process."""
    with lost_ranks(call.method):
        return await call.make(worker)


class WorkerHandle(Protocol):
    """The driver's side of a worker."""

    async def start(self, call: Call) -> Awaitable[Any]:
        """Send a call; returns an awaitable of its result once the worker is sure to receive the call."""
        ...

    @property
    def rank(self) -> int:
        """Rank of the worker among all workers of the run."""
        ...

    @property
    def lost(self) -> LostWorkerError | None:
        """The error of a worker whose process has ended, or hung and was killed; None while it runs."""
        ...

    def forget_images(self) -> None:
        """Free the images that calls have sent so far, at both ends; do nothing while a collective call runs.

        The answer to `compute_logprobs` refers to images whose pixels it does not contain.
        """
        ...

    @property
    def image_bytes(self) -> int:
        """Bytes of image tensors sent so far."""
        ...

    @property
    def sent_bytes(self) -> int:
        """Bytes of messages sent so far, including images."""
        ...

    async def close(self) -> None:
        """End the worker."""
        ...


async def call_each(calls: Iterable[tuple[WorkerHandle, Call]]) -> list[Any]:
    """Make calls on several workers at once; returns their results, or raises the first error.

    If that is a LostRankError, raise the error of the lost worker instead if it arrives soon.
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
        """Do nothing: no images are sent within the process."""

    async def close(self) -> None:
        await self._worker.close()


@dataclass(frozen=True, slots=True, eq=False)
class _Unstarted:
    """A call that begins when it is awaited: a blocking call must not begin before all workers have received theirs."""

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
        """`learners` are ordered by rank; a worker in both lists holds a shard of the policy and an engine.

        `release` frees the resources of the workers after they are closed.
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
        """All workers except the lost ones."""
        return [*self.learners, *self.engines_only]

    @property
    def engines_only(self) -> list[WorkerHandle]:
        """Workers that hold only an engine."""
        return [handle for handle in self.engines if handle not in self.learners]

    def drop(self, handle: WorkerHandle, error: LostWorkerError | LostEngineError) -> None:
        """Continue without the lost engine of a worker; raise `error` for a learner, or for the last engine."""
        left = [each for each in self.engines if each is not handle]
        if handle in self.learners or not left:
            raise error
        self._lost += len(self.engines) - len(left)
        self.engines = left

    async def drop_ended(self) -> None:
        """Continue without the engines that have ended, including idle ones."""
        for handle in self.engines_only:
            try:
                await call_each([(handle, Call(method="check_engine"))])
            except (LostWorkerError, LostEngineError) as error:
                self.drop(handle, error)

    def engines_lost(self) -> int:
        """Number of engines lost since the last call."""
        lost, self._lost = self._lost, 0
        return lost

    def note_reissued(self) -> None:
        """Count a request that is sent again because its engine was lost."""
        self._reissued += 1

    def requests_reissued(self) -> int:
        """Number of requests sent again since the last call."""
        reissued, self._reissued = self._reissued, 0
        return reissued

    def images_mib(self) -> float:
        """MiB of image tensors sent to other processes since the last call."""
        before = self._measured_bytes
        self._measured_bytes = sum(handle.image_bytes for handle in self._all)
        return (self._measured_bytes - before) / 2**20

    @property
    def sent_bytes(self) -> int:
        """Bytes of messages sent to other processes so far, including images."""
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
    """Within the block, raise LostRankError in place of errors of the process group."""
    try:
        yield
    except FoveaError:
        raise
    except RuntimeError as error:
        # gloo has no error type, so its errors are recognised by their text
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
