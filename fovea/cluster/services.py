"""Policy, engine and weight sync of a run with several workers, each of which the driver sees as one object."""

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
"""Requests whose engine is remembered: more than a step has, but bounded for engines that never sleep."""


class WorkersPolicy:
    """A policy whose weights are sharded over the learners, each of which gets the pixels of its own rows only.

    Calls without images are forwarded by name.
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
        peak = Call(method="peak_gib")
        peaks_gib: list[float] = await call_each((learner, peak) for learner in self.workers.learners)
        return metrics | {
            "transfer/images_mib": self.workers.images_mib(),
            "transfer/requests_reissued": float(self.workers.requests_reissued()),
            "transfer/engines_lost": float(self.workers.engines_lost()),
            "memory/learners_peak_gib": max(peaks_gib),
        }

    async def sft(self, pairs: Sequence[SftExample]) -> Metrics:
        images = (await self._images()).to_imitate([pair.prompt for pair in pairs])
        metrics: Metrics = await self._call("sft", pairs, images=images)
        # warm-up steps end without a weight sync, so images of all steps would pile up at both ends
        for learner in self.workers.learners:
            learner.forget_images()
        return metrics

    def describe(self) -> ModelFacts:
        return self._facts

    async def close(self) -> None:
        """End all workers, including their engines."""
        await self.workers.close()

    async def _images(self) -> ImagesByRank:
        call = Call(method="policy.images_by_rank")
        found: list[ImagesByRank] = await call_each([(self.workers.learners[0], call)])
        return found[0]

    async def _call(self, method: str, *arguments: Any, images: Sequence[ImageKeys] | None = None) -> Any:
        """Make a call on all learners; returns the result of the first learner, since all results are equal.

        `images` holds, by learner, the keys of the images whose pixels it needs; without it, no pixels are sent.
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
        """Make the sender send only to the engines that are left."""
        # a weight sync is collective: one lost engine would end all workers
        await self._workers.drop_ended()
        receivers = self._workers.engines_only
        if len(receivers) == self._num_receivers:
            return
        self._num_receivers = len(receivers)
        left = [handle.rank for handle in receivers]
        call = Call(method="weight_sync.leave_out_lost", arguments=(left,))
        await call_each((handle, call) for handle in [self._workers.learners[0], *receivers])


class WorkersEngine:
    """The engines of all workers as one; a request goes to the engine with the fewest completions to generate.

    If an engine is lost, with or without its worker's process, its requests are sent again to another engine, with the
    same seeds.
    """

    def __init__(self, workers: Workers, name: str, *, repeats_in_rounds: bool = False) -> None:
        self.name = name
        self.repeats_in_rounds = repeats_in_rounds
        """True if the engines of all workers repeat in rounds; requests are then assigned the same way in every run."""
        self._workers = workers
        self._running: Counter[WorkerHandle] = Counter()
        """Number of completions that each engine is generating."""
        self._kept: LRUCache[str, WorkerHandle] = LRUCache(MAX_KEPT)
        """The engine that keeps the KV cache of a request's completions for their next turn, by request id."""

    async def generate(self, request: Request) -> Sequence[Completion]:
        """Sample n completions on one engine; a later turn goes to the engine of the turn before.

        LostWorkerError or LostEngineError if the last engine is lost, or an engine whose process also trains.
        """
        while True:
            engine = self._engine_of(request)
            try:
                return await self._generate(engine, request)
            except (LostWorkerError, LostEngineError) as error:
                # a dead process cannot answer any more, so no completion arrives twice
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
        """Free the memory of engines that share a device with a shard of the policy; other engines stay awake."""
        self._kept = LRUCache(MAX_KEPT)
        await call_each((handle, Call(method="engine.sleep")) for handle in self._workers.both)

    async def wake(self) -> None:
        """Wake the engines that `sleep` put to sleep."""
        await call_each((handle, Call(method="engine.wake")) for handle in self._workers.both)

    def forget_images(self) -> None:
        """Free the images of requests: an evaluation has no weight sync that would free them."""
        for engine in self._workers.engines:
            engine.forget_images()

    async def close(self) -> None:
        """Do nothing: an engine is closed with its worker, by `WorkersPolicy.close`."""
        # a close call would hang on a worker that waits in a collective call which other workers have left

    def _engine_of(self, request: Request) -> WorkerHandle:
        engines = self._workers.engines
        kept = None if request.continues is None else self._kept.get(request.continues.rpartition("/")[0])
        return kept if kept in engines else min(engines, key=self._running.__getitem__)
