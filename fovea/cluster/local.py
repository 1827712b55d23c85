"""Policy and engine in the driver's process, sharing tensors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fovea.cluster.weights import SyncReport, WeightSource, WeightTarget, check_copies, check_names
from fovea.train.base import ModelFacts, Needs, Pair, PolicyWorker
from fovea.types import Batch, Metrics


class SharedWeights:
    """Weight sync within one process: the engine takes references to the policy's tensors."""

    def __init__(self, source: WeightSource, target: WeightTarget) -> None:
        self._source = source
        self._target = target

    async def push(self, version: int) -> SyncReport:
        sent = dict(self._source.weights())
        check_names(sent, self._target.weight_names)
        held = self._target.load_weights(sent, version)
        return SyncReport(version=version, num_tensors=len(sent), bytes_copied=check_copies(sent, held))


class LocalPolicy:
    """A policy whose only worker is this process; its calls block the event loop."""

    # not on a thread: nothing else has work while the weights change, and torch's autograd and thread settings belong
    # to the thread that made them

    def __init__(self, worker: PolicyWorker) -> None:
        self.worker = worker

    async def annotate(self, batch: Batch, needs: Needs) -> Batch:
        return self.worker.annotate(batch, needs)

    async def update(self, batch: Batch) -> Metrics:
        return self.worker.update(batch)

    async def sft(self, pairs: Sequence[Pair]) -> Metrics:
        return self.worker.sft(pairs)

    async def snapshot_reference(self) -> None:
        self.worker.snapshot_reference()

    async def save(self, folder: Path) -> None:
        self.worker.save(folder)

    async def load(self, folder: Path) -> None:
        self.worker.load(folder)

    async def export(self, folder: Path) -> None:
        self.worker.export(folder)

    def describe(self) -> ModelFacts:
        return self.worker.describe()

    async def close(self) -> None:
        self.worker.close()
