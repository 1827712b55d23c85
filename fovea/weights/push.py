"""Pushes of a policy's weights: gathered one by one, and given to sinks in buckets of bounded size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from fovea.models.outgoing import OutgoingWeight
from fovea.train.local import Caller, call_here
from fovea.train.torch.sharding import full
from fovea.utils.checksum import bit_hash, combined
from fovea.weights.base import LosesEngines, SyncReport, WeightSink
from fovea.weights.sinks import SharedTensors, read_compared

BUCKET_BYTES = 1 << 26
"""Tensors that a sink gets in one call: enough that calls cost nothing, and little beside a layer of a large model."""


class WeightPusher:
    """Gives the tensors of a policy to this process's sinks; all ranks of the policy make the same pushes.

    The first push brings all weights, later ones those that training changes: not a frozen tower, and with LoRA only
    the adapters where the engine takes them. The push after one that failed brings all weights again.
    """

    def __init__(
        self,
        weights: Callable[[], Iterable[OutgoingWeight]],
        sinks: Sequence[WeightSink],
        *,
        dtype: torch.dtype | None = None,
        always_all: bool = False,
        call: Caller = call_here,
    ) -> None:
        """`dtype` is that of the engines' weights, where the policy's shards may be of another. With `always_all`,
        every push brings all weights; all ranks must agree on it, also those without a sink.

        `call` makes the calls of the policy, whose collectives must not mix with those of a push.
        """
        self._weights = weights
        self._sinks = sinks
        self._dtype = dtype
        self._call = call
        self._always_all = always_all
        self._sent_all = False

    async def push(self, version: int) -> SyncReport:
        report: SyncReport = await self._call(self._push, version)
        return report

    async def leave_out_lost(self, left: Sequence[int]) -> None:
        """Send only to the remaining engines elsewhere, by rank among all workers."""
        for sink in self._sinks:
            if isinstance(sink, LosesEngines):
                sink.leave_out_lost(left)

    def _push(self, version: int) -> SyncReport:
        # `_sent_all` for the ranks without a sink, which gather along
        sends_all = self._always_all or not self._sent_all or not all(sink.has_weights for sink in self._sinks)
        sent = [weight for weight in self._weights() if weight.is_trained or sends_all]
        self._sent_all = False
        for sink in self._sinks:
            sink.begin_push({weight.name: weight.shape for weight in sent})
        hashes: list[Tensor] = []
        num_bytes = 0
        for bucket in in_buckets((each.name, full(each.tensor(), self._dtype).contiguous()) for each in sent):
            hashes += [bit_hash(tensor) for _, tensor in bucket if self._sinks]
            num_bytes += sum(tensor.nbytes for _, tensor in bucket)
            for sink in self._sinks:
                sink.take_weights(bucket)
        bits = read_compared(hashes, self._sinks)
        for sink in self._sinks:
            sink.finish_push(version)
        self._sent_all = True
        is_copied = any(not isinstance(sink, SharedTensors) for sink in self._sinks)
        return SyncReport(
            version=version,
            num_tensors=len(sent),
            bytes_copied=num_bytes if is_copied else 0,
            checksum=combined(bits) if self._sinks else None,
        )


def in_buckets(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """The tensors in lists, each ended by the tensor with which it has BUCKET_BYTES."""
    bucket: list[tuple[str, Tensor]] = []
    num_bytes = 0
    for name, tensor in tensors:
        bucket.append((name, tensor))
        num_bytes += tensor.nbytes
        if num_bytes >= BUCKET_BYTES:
            yield bucket
            bucket, num_bytes = [], 0
    if bucket:
        yield bucket
