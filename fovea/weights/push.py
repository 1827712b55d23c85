"""Pushes of a policy's weights, gathered one by one in buckets of bounded size, and the sinks that take them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from fovea.errors import EngineError
from fovea.models.outgoing import OutgoingWeight
from fovea.rollout.checks import check_shapes
from fovea.train.local import Caller, call_here
from fovea.train.torch.sharding import full
from fovea.types import Shape, Weights
from fovea.utils.checksum import bit_hash, combined, read_hashes
from fovea.weights.base import SyncReport, WeightSink
from fovea.weights.broadcast import Broadcast


class NetworkEngine(Protocol):
    """An engine that samples with tensors in this process."""

    def own_weights(self) -> Weights:
        """The tensors of the engine's network, under the names of a push."""
        ...

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Take references to these weights, all of them, and empty all caches made with older ones."""
        ...


class SharedTensors:
    """Gives an engine the policy's tensors themselves; nothing is copied."""

    def __init__(self, engine: NetworkEngine) -> None:
        self._engine = engine
        self._tensors: dict[str, Tensor] = {}
        """The last tensor of each name."""
        self.has_weights = False

    def begin_push(self, shapes: Mapping[str, Shape]) -> None:
        _check(shapes, dict(self._engine.own_weights()), has_all=self.has_weights)

    def take_weights(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        self._tensors |= bucket

    def finish_push(self, version: int) -> None:
        self._engine.load_weights(self._tensors, version)
        self.has_weights = True


class NetworkCopy:
    """Copies into the tensors of an engine's network, in place."""

    def __init__(self, engine: NetworkEngine) -> None:
        self._engine = engine
        self._own = dict(engine.own_weights())
        self._names: list[str] = []
        """Names of the tensors of this push, in its order."""
        self._converted: dict[str, Tensor] = {}
        """Hashes of those that have another type in the engine, as it holds them if they arrive."""
        self.has_weights = False

    def begin_push(self, shapes: Mapping[str, Shape]) -> None:
        _check(shapes, self._own, has_all=self.has_weights)
        self._names, self._converted = [], {}

    @torch.no_grad()
    def take_weights(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        for name, tensor in bucket:
            own = self._own[name]
            if not own.untyped_storage().nbytes():
                own.untyped_storage().resize_(own.nbytes)  # the engine's sleep has freed it
            own.copy_(tensor)
            self._names.append(name)
            if tensor.dtype != own.dtype:
                self._converted[name] = bit_hash(tensor.to(own.dtype))

    def hashes(self) -> list[Tensor]:
        """Hashes of the tensors of this push as the engine holds them, then of those that it holds in another type.

        To be taken after the last tensor: one that shares memory with another would be overwritten later.
        """
        return [*(bit_hash(self._own[name]) for name in self._names), *self._converted.values()]

    def compare(self, sent: Sequence[int], numbers: Sequence[int]) -> None:
        """Compare the numbers of `hashes` with those of the tensors that were sent; EngineError where one differs."""
        held, converted = numbers[: len(self._names)], numbers[len(self._names) :]
        due = dict(zip(self._names, sent, strict=True)) | dict(zip(self._converted, converted, strict=True))
        differing = [name for name, number in zip(self._names, held, strict=True) if number != due[name]]
        if differing:
            raise EngineError(
                f"the weight {differing[0]} differs between trainer and engine after it was copied; run again, and "
                "report this as a bug if it comes back"
            )

    def finish_push(self, version: int) -> None:
        """Let the engine use its tensors, which `read_compared` has compared."""
        self._engine.load_weights(self._own, version)
        self.has_weights = True


def read_compared(hashes: Sequence[Tensor], sinks: Sequence[object]) -> list[int]:
    """The numbers of the hashes of what was sent, compared with what copies hold, in one read of the device."""
    copies = [sink for sink in sinks if isinstance(sink, NetworkCopy)]
    sent, *found = read_hashes(hashes, *(copy.hashes() for copy in copies))
    for copy, numbers in zip(copies, found, strict=True):
        copy.compare(sent, numbers)
    return sent


def _check(shapes: Mapping[str, Shape], own: Mapping[str, Tensor], *, has_all: bool) -> None:
    """EngineError unless these are all of an engine's weights or, where it has all, some of them."""
    due = shapes.keys() & own.keys() if has_all else own.keys()
    check_shapes(shapes, {name: tuple(own[name].shape) for name in due}, engine="the engine")


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
            if isinstance(sink, Broadcast):
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
