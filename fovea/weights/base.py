"""Protocols of a weight sync from the policy to the engines, and its report.

An engine that shares the policy's tensors receives only the new version number (`weights.sync.SharedWeights`). For any
other engine, `weights.sync.WeightSender` sends the policy's weights one by one (`models.weights_to_sync.WeightToSync`)
to receivers. A new transport implements `WeightReceiver` and, if it crosses processes, also `WeightSync` in the worker
of the receiving engine; `wiring.workers` constructs both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from fovea.rollout.base import Engine
from fovea.types import Metrics, Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """Result of one weight sync."""

    version: int
    num_tensors: int
    """Number of tensors sent, without shared ones; from the second weight sync on, only those that training changes."""
    bytes_copied: int
    """Bytes sent to each engine; 0 if policy and engine share their tensors."""
    checksum: int | None = None
    """Checksum of the tensors that this worker sent or received; None if it did neither, for example because policy and
    engine share their tensors."""

    def metrics(self) -> Metrics:
        """Return the metrics of this weight sync."""
        metrics = {"transfer/weights_mib": self.bytes_copied / 2**20}
        return metrics if self.checksum is None else metrics | {"weights_checksum": float(self.checksum)}


class WeightSync(Protocol):
    """Transfers the policy's weights to every engine."""

    async def sync(self, version: int) -> SyncReport:
        """Make the engines sample from the policy's current weights, as `version`.

        Afterwards all names have matched on both sides, all copies are bit-identical, and all caches made with older
        weights (prefix, images, decode copies) are empty. Raises EngineError if one of these fails.
        """
        ...


@runtime_checkable
class LosesEngines(Protocol):
    """A receiver for several engines in other processes, which continues without engines that are lost."""

    def leave_out_lost(self, left: Sequence[int]) -> None:
        """Continue with the remaining engines only; `left` holds their ranks among all workers."""
        ...


class WeightReceiver(Protocol):
    """A destination of weights: an engine with its own weights, a network copy, or engines in other processes."""

    @property
    def has_weights(self) -> bool:
        """True if the receiver holds all weights, so that a weight sync may send only those that training changes."""
        ...

    def begin_sync(self, shapes: Mapping[str, Shape]) -> None:
        """Prepare for weights of these names and shapes; raises EngineError without any change if they do not match."""
        ...

    def receive_weights(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        """Load a bucket of complete weights; an engine with its own weights must copy them during the call."""
        ...

    def finish_sync(self, version: int) -> None:
        """Verify the new weights, switch to them, and empty all caches computed with older ones.

        Raises EngineError if a value differs. For copies in this process, `sync.read_compared` has already compared the
        values; a receiver in another process compares hashes of the weights that it was sent.
        """
        ...


class SyncedEngine(Engine, WeightReceiver, Protocol):
    """An engine with its own weights, in this process or started by it, that receives weight syncs."""
