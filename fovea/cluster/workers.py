"""Policy and engines spread over worker processes, for a driver that sees one of each.

Each worker holds its shard of the policy and an engine of its own. Calls of the policy and pushes of weights are
collective: every worker makes them, in the same order. A request goes to one worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from fovea.cluster.local import LocalPolicy
from fovea.cluster.weights import SyncReport, WeightSync
from fovea.rollout.base import Engine
from fovea.train.base import ModelFacts, Needs, Pair, PolicyWorker
from fovea.types import Batch, Completion, Metrics, Request

Service = Literal["policy", "engine", "weight_sync"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """The services of one process."""

    policy: LocalPolicy
    engine: Engine
    weight_sync: WeightSync

    @staticmethod
    def of(policy: PolicyWorker, engine: Engine, weight_sync: WeightSync) -> Worker:
        """A worker whose policy is this process's share of the model under training."""
        return Worker(policy=LocalPolicy(policy), engine=engine, weight_sync=weight_sync)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call of one service of a worker."""

    service: Service
    method: str
    arguments: tuple[Any, ...] = ()

    async def run(self, worker: Worker) -> Any:
        """Make the call in the worker's process."""
        return await getattr(getattr(worker, self.service), self.method)(*self.arguments)


class WorkerHandle(Protocol):
    """The driver's side of a worker in another process."""

    async def start(self, call: Call) -> Awaitable[Any]:
        """Send a call; returns once the worker is sure to receive it, with what awaits its result."""
        ...

    def forget_images(self) -> None:
        """Free the images that calls have brought so far, on both ends."""
        ...

    @property
    def image_bytes(self) -> int:
        """Bytes of image tensors sent so far."""
        ...

    async def close(self) -> None:
        """End the worker's process."""
        ...


class Workers:
    """The driver's own worker and those of other processes."""

    def __init__(self, local: Worker, remote: Sequence[WorkerHandle]) -> None:
        self.local = local
        self.remote = remote
        self._measured_bytes = 0

    async def call_all(self, call: Call) -> Any:
        """Make a call on every worker; returns the local result. The first error of any is raised."""
        # sent to all others first: the local call may block this thread until they take part
        answers = [await handle.start(call) for handle in self.remote]
        result = await call.run(self.local)
        await asyncio.gather(*answers)
        return result

    def images_mib(self) -> float:
        """MiB of image tensors sent to other processes since the last call."""
        before = self._measured_bytes
        self._measured_bytes = sum(handle.image_bytes for handle in self.remote)
        return (self._measured_bytes - before) / 2**20


class WorkersPolicy:
    """A policy whose weights are sharded over the workers."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    async def annotate(self, batch: Batch, needs: Needs) -> Batch:
        annotated: Batch = await self._call("annotate", batch, needs)
        return annotated

    async def update(self, batch: Batch) -> Metrics:
        metrics: Metrics = await self._call("update", batch)
        return metrics | {"transfer/images_mib": self._workers.images_mib()}

    async def sft(self, pairs: Sequence[Pair]) -> Metrics:
        metrics: Metrics = await self._call("sft", pairs)
        return metrics

    async def snapshot_reference(self) -> None:
        await self._call("snapshot_reference")

    async def save(self, folder: Path) -> None:
        await self._call("save", folder)

    async def load(self, folder: Path) -> None:
        await self._call("load", folder)

    async def export(self, folder: Path) -> None:
        await self._call("export", folder)

    def describe(self) -> ModelFacts:
        return self._workers.local.policy.describe()

    async def close(self) -> None:
        await asyncio.gather(*(handle.close() for handle in self._workers.remote))
        await self._workers.local.policy.close()

    async def _call(self, method: str, *arguments: Any) -> Any:
        return await self._workers.call_all(Call(service="policy", method=method, arguments=arguments))


class WorkersWeights:
    """Weight sync on every worker, from the sharded policy to the worker's own engine."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    async def push(self, version: int) -> SyncReport:
        report: SyncReport = await self._workers.call_all(
            Call(service="weight_sync", method="push", arguments=(version,))
        )
        for handle in self._workers.remote:
            handle.forget_images()
        return report


class WorkersEngine:
    """The engines of all workers as one; a request goes to the one with the fewest completions to generate."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._running = [0] * (1 + len(workers.remote))
        """Completions that each engine is generating, the driver's own first."""
        self._kept: dict[str, int] = {}
        """The engine that keeps the KV cache of a request's completions for their next turn, by request id."""

    @property
    def name(self) -> str:
        return self._workers.local.engine.name

    async def generate(self, request: Request) -> Sequence[Completion]:
        """Sample n completions on one engine; a later turn goes to the engine of the turn before."""
        engine = self._engine_of(request)
        if request.keep:
            self._kept[request.id] = engine
        self._running[engine] += request.n
        try:
            if engine == 0:
                return await self._workers.local.engine.generate(request)
            answer = await self._workers.remote[engine - 1].start(_engine("generate", request))
            completions: Sequence[Completion] = await answer
            return completions
        finally:
            self._running[engine] -= request.n

    async def pause(self) -> None:
        await self._workers.call_all(_engine("pause"))

    async def resume(self) -> None:
        await self._workers.call_all(_engine("resume"))

    async def sleep(self) -> None:
        self._kept.clear()
        await self._workers.call_all(_engine("sleep"))

    async def wake(self) -> None:
        await self._workers.call_all(_engine("wake"))

    async def close(self) -> None:
        # the others are closed by their own processes as these end: an answer of one that waits in a collective call,
        # which this process has left, would never come
        await self._workers.local.engine.close()

    def _engine_of(self, request: Request) -> int:
        kept = None if request.continues is None else self._kept.get(request.continues.rpartition("/")[0])
        return min(range(len(self._running)), key=self._running.__getitem__) if kept is None else kept


def _engine(method: str, *arguments: Any) -> Call:
    return Call(service="engine", method=method, arguments=arguments)
