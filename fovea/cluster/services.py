"""Policy, engine and weight sync of a run whose workers are several, for a driver that sees one of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from fovea.cluster.workers import WorkerHandle, Workers, call_each
from fovea.errors import EngineError, LostEngineError, LostWorkerError
from fovea.processes.calls import Call
from fovea.processes.messages import Share, SharedArguments
from fovea.train.base import CALLS, ModelFacts, Needs, SftExample
from fovea.train.row_assignment import ImageKeys
from fovea.train.schedule import ImagesByRank
from fovea.types import Batch, Completion, Metrics, Request
from fovea.weights.base import SyncReport
from fovea_gym.utils.lru_cache import LRUCache

MAX_KEPT = 1 << 16
"""Requests whose engine is remembered: more than a step has, and few where engines that train nothing never sleep."""


class WorkersPolicy:
    """A policy whose weights are sharded over the learners, each of which gets the pixels of its own rows only.

    Calls without pictures are forwarded by name.
    """

    def __init__(self, workers: Workers, facts: ModelFacts) -> None:
        self.workers = workers
        self._facts = facts

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        if name not in CALLS:
            raise AttributeError(f"a policy has no call {name}")
        return partial(self._call, name)

    async def compute_logprobs(self, batch: Batch, needs: Needs) -> Batch:
        images = (await self._images()).for_logprobs(
            batch,
            policy_passes=needs.old_logprobs or needs.values,
            reference_passes=needs.reference_logprobs,
            masked_passes=needs.masked_logprobs,
            beside_engine=needs.beside_engine,
        )
        with_logprobs: Batch = await self._call("compute_logprobs", batch, needs, images=images)
        return with_logprobs

    async def update(self, batch: Batch) -> Metrics:
        images = (await self._images()).to_update(batch)
        metrics: Metrics = await self._call("update", batch, images=images)
        return metrics | {
            "transfer/images_mib": self.workers.images_mib(),
            "transfer/requests_reissued": float(self.workers.requests_reissued()),
            "transfer/engines_lost": float(self.workers.engines_lost()),
            "memory/learners_peak_gib": await self._peak_gib(),
        }

    async def sft(self, pairs: Sequence[SftExample]) -> Metrics:
        images = (await self._images()).to_imitate([pair.prompt for pair in pairs])
        metrics: Metrics = await self._call("sft", pairs, images=images)
        # no weight sync ends a step of the warm-up: images of all of its steps would pile up on both ends
        for learner in self.workers.learners:
            learner.forget_images()
        return metrics

    def describe(self) -> ModelFacts:
        return self._facts

    async def close(self) -> None:
        """End all workers, their engines included."""
        await self.workers.close()

    async def _peak_gib(self) -> float:
        call = Call(method="peak_gib")
        found: list[float] = await call_each((learner, call) for learner in self.workers.learners)
        return max(found)

    async def _images(self) -> ImagesByRank:
        call = Call(method="policy.images_by_rank")
        found: list[ImagesByRank] = await call_each([(self.workers.learners[0], call)])
        return found[0]

    async def _call(self, method: str, *arguments: Any, images: Sequence[ImageKeys] | None = None) -> Any:
        """Make a call on all learners; returns the result of the first, which is that of all.

        `images` has the keys of those whose pixels each learner needs; none without it.
        """
        learners, shared = self.workers.learners, SharedArguments(arguments)
        shares = [Share(shared, keys) for keys in images or [frozenset()] * len(learners)]
        calls = [
            (learner, Call(method=f"policy.{method}", arguments=share, returns=rank == 0))
            for rank, (learner, share) in enumerate(zip(learners, shares, strict=True))
        ]
        return (await call_each(calls))[0]


class WorkersWeights:
    """Weight sync from the sharded policy to the engines of all workers."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._num_receivers = len(workers.engines_only)

    async def sync(self, version: int) -> SyncReport:
        await self._leave_out_the_lost()
        call = Call(method="weight_sync.sync", arguments=(version,))
        reports: list[SyncReport] = await call_each((handle, call) for handle in self._workers.all)
        checksums = {report.checksum for report in reports if report.checksum is not None}
        if len(checksums) > 1:
            raise EngineError(
                f"the engines hold different weights after the weight sync of version {version} (checksums "
                f"{checksums}); run again, and report this as a bug if it happens again"
            )
        for handle in self._workers.all:
            handle.forget_images()
        return reports[0]

    async def _leave_out_the_lost(self) -> None:
        """Have the sender send only to those engines that are left."""
        # in a weight sync, which is collective, the loss of one would end all
        await self._workers.drop_ended()
        receivers = self._workers.engines_only
        if len(receivers) == self._num_receivers:
            return
        self._num_receivers = len(receivers)
        left = [handle.rank for handle in receivers]
        call = Call(method="weight_sync.leave_out_lost", arguments=(left,))
        await call_each((handle, call) for handle in [self._workers.learners[0], *receivers])


class WorkersEngine:
    """The engines of all workers as one; a request goes to the one with the fewest completions to generate.

    Requests of an engine that is lost, with or without its worker's process, are made again on another, with the same
    seeds.
    """

    def __init__(self, workers: Workers, name: str, *, repeats_in_rounds: bool = False) -> None:
        self.name = name
        self.repeats_in_rounds = repeats_in_rounds
        """True if those of all workers do, whose requests are then dealt out the same in every run."""
        self._workers = workers
        self._running: Counter[WorkerHandle] = Counter()
        """Completions that each engine is generating."""
        self._kept: LRUCache[str, WorkerHandle] = LRUCache(MAX_KEPT)
        """The engine that keeps the KV cache of a request's completions for their next turn, by request id."""

    async def generate(self, request: Request) -> Sequence[Completion]:
        """Sample n completions on one engine; a later turn goes to the engine of the turn before.

        LostWorkerError or LostEngineError if the last engine is lost, or one in a process that trains too.
        """
        while True:
            engine = self._engine_of(request)
            try:
                return await self._generate(engine, request)
            except (LostWorkerError, LostEngineError) as error:
                # of a dead process no answer can come any more: no completion is there twice
                self._workers.drop(engine, error)
                self._workers.note_reissued()

    async def _generate(self, engine: WorkerHandle, request: Request) -> Sequence[Completion]:
        if request.keep:
            self._kept.put(request.id, engine, 1)
        self._running[engine] += request.n
        try:
            answer = await engine.start(Call(method="engine.generate", arguments=(request,)))
            completions: Sequence[Completion] = await answer
            return completions
        finally:
            self._running[engine] -= request.n

    async def sleep(self) -> None:
        """Free the memory of engines that share a device with a shard of the policy; the others go on."""
        self._kept = LRUCache(MAX_KEPT)
        await call_each((handle, Call(method="engine.sleep")) for handle in self._workers.both)

    async def wake(self) -> None:
        """Wake the engines that `sleep` put to sleep."""
        await call_each((handle, Call(method="engine.wake")) for handle in self._workers.both)

    def forget_images(self) -> None:
        """Free the images of requests, which no weight sync ends in an evaluation."""
        for engine in self._workers.engines:
            engine.forget_images()

    async def close(self) -> None:
        """Do nothing: an engine is closed with its worker, by `WorkersPolicy.close`."""
        # by a call, the answer of a worker that waits in a collective call, which others have left, would never come

    def _engine_of(self, request: Request) -> WorkerHandle:
        engines = self._workers.engines
        kept = None if request.continues is None else self._kept.get(request.continues.rpartition("/")[0])
        return kept if kept in engines else min(engines, key=self._running.__getitem__)
