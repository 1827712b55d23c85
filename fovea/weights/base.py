"""The one way for weights from the policy to the engines: its protocols, and the report of a push.

A policy's weights come one by one (`models.outgoing.OutgoingWeight`); `weights.push.WeightPusher` gives them to sinks.
A new transport is a new sink, and a line in `wiring.workers` (for one process `wiring.backends`) that makes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from fovea.types import Metrics, Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """Result of one push of weights."""

    version: int
    num_tensors: int
    """Tensors that the push brought; from the second on, only those that training changes."""
    bytes_copied: int
    """Bytes that it brought to each engine; 0 where policy and engine share their tensors."""
    checksum: int | None = None
    """Checksum of these tensors as this worker sent or received them; None where it did neither."""

    def metrics(self) -> Metrics:
        """Metrics of a push."""
        metrics = {"transfer/weights_mib": self.bytes_copied / 2**20}
        return metrics if self.checksum is None else metrics | {"weights_checksum": float(self.checksum)}


class WeightSync(Protocol):
    """Transfers the policy's weights to every engine."""

    async def push(self, version: int) -> SyncReport:
        """Make the engines sample from the policy's current weights, as `version`.

        Afterwards every name has matched on both sides, copies are equal bit for bit, and caches made with older
        weights (prefix, images, decode copies) are empty; EngineError if one of these fails.
        """
        ...


class WeightSink(Protocol):
    """A destination of weights: an engine with its own, one on a network of Fovea's, or processes of other engines."""

    @property
    def has_weights(self) -> bool:
        """True if it holds all weights, so that a push may bring only those that training changes."""
        ...

    def begin_push(self, shapes: Mapping[str, Shape]) -> None:
        """Prepare for weights of these names and shapes; EngineError, and nothing changed, if they do not match."""
        ...

    def take_weights(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        """Take some of them, whole; the tensors of an engine with its own weights are valid during the call only."""
        ...

    def finish_push(self, version: int) -> None:
        """Compare what is held now with what was sent, and empty all caches made with older weights.

        EngineError for a value that differs.
        """
        ...
