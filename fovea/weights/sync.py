"""Weight syncs from the policy to the engines.

An engine that shares the policy's tensors only needs to know that they have changed (`SharedWeights`). For all other
engines, `WeightSender` gathers the weights one by one and passes them to receivers in buckets of bounded size: to a
copy of the network in this process, to an engine with its own weights, or to engines in other processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from fovea.errors import EngineError
from fovea.models.weights_to_sync import WeightToSync
from fovea.rollout.base import Engine
from fovea.rollout.checks import check_shapes
from fovea.train.local import Caller, call_here
from fovea.train.torch.sharding import full
from fovea.types import Shape, Weights
from fovea.utils.checksum import bit_hash, combined, read_hashes
from fovea.weights.base import LosesEngines, SyncReport, WeightReceiver

BUCKET_BYTES = 1 << 26
"""Size of the tensors in one call of a receiver: large enough that calls cost little, and small compared with a layer
of a large model."""


@runtime_checkable
class NetworkEngine(Engine, Protocol):
    """An engine that samples with tensors in this process."""

    def own_weights(self) -> Weights:
        """Return the tensors of the engine's network, under the names that a weight sync uses."""
        ...

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Keep references to all of these weights, and empty all caches computed with older ones."""
        ...


class WeightSender:
    """Sends the tensors of a policy to this process's receivers; all ranks of the policy run the same weight syncs.

    The first weight sync sends all weights. Later ones send only those that training changes, without a frozen tower;
    with LoRA, these are the adapters if the engine can load them. After a failed weight sync, the next one sends all.
    """

    def __init__(
        self,
        weights: Callable[[], Iterable[WeightToSync]],
        receivers: Sequence[WeightReceiver],
        *,
        dtype: torch.dtype | None = None,
        always_all: bool = False,
        call: Caller = call_here,
    ) -> None:
        """`dtype` is the dtype of the engines' weights; the policy's shards may have another one.

        With `always_all`, every weight sync sends all weights; it must be equal on all ranks, also on those without a
        receiver. `call` runs weight syncs in turn with the policy's other calls, so that collectives never interleave.
        """
        self._weights = weights
        self._receivers = receivers
        self._dtype = dtype
        self._call = call
        self._always_all = always_all
        self._sent_all = False

    async def sync(self, version: int) -> SyncReport:
        report: SyncReport = await self._call(self._sync, version)
        return report

    async def leave_out_lost(self, left: Sequence[int]) -> None:
        """Send only to the remaining engines in other processes; `left` holds their ranks among all workers."""
        for receiver in self._receivers:
            if isinstance(receiver, LosesEngines):
                receiver.leave_out_lost(left)

    def _sync(self, version: int) -> SyncReport:
        # `_sent_all` also covers ranks without a receiver, which take part in the gathering
        sends_all = (
            self._always_all or not self._sent_all or not all(receiver.has_weights for receiver in self._receivers)
        )
        sent = [weight for weight in self._weights() if weight.is_trained or sends_all]
        self._sent_all = False
        for receiver in self._receivers:
            receiver.begin_sync({weight.name: weight.shape for weight in sent})
        hashes: list[Tensor] = []
        num_bytes = 0
        for bucket in in_buckets((each.name, full(each.tensor(), self._dtype).contiguous()) for each in sent):
            if self._receivers:
                hashes += [bit_hash(tensor) for _, tensor in bucket]
                num_bytes += sum(tensor.nbytes for _, tensor in bucket)
            for receiver in self._receivers:
                receiver.receive_weights(bucket)
        bits = read_compared(hashes, self._receivers)
        for receiver in self._receivers:
            receiver.finish_sync(version)
        self._sent_all = True
        return SyncReport(
            version=version,
            num_tensors=len(sent),
            bytes_copied=num_bytes,
            checksum=combined(bits) if self._receivers else None,
        )


class SharedWeights:
    """The weight sync of an engine that shares the policy's tensors, and of a run's engines in other processes, if any.

    The shared tensors are neither sent nor compared: the engine takes new references to them and empties its caches.
    """

    def __init__(self, engine: NetworkEngine, elsewhere: WeightSender | None = None) -> None:
        self._engine = engine
        self._elsewhere = elsewhere

    async def sync(self, version: int) -> SyncReport:
        report = SyncReport(version=version, num_tensors=0, bytes_copied=0)
        if self._elsewhere is not None:
            report = await self._elsewhere.sync(version)
        self._engine.load_weights(dict(self._engine.own_weights()), version)
        return report

    async def leave_out_lost(self, left: Sequence[int]) -> None:
        """Send only to the remaining engines in other processes; `left` holds their ranks among all workers."""
        assert self._elsewhere is not None, f"there is no engine in other processes, yet these remain: {left}"
        await self._elsewhere.leave_out_lost(left)


class NetworkCopy:
    """A receiver that copies weights in place into the tensors of an engine's network."""

    def __init__(self, engine: NetworkEngine) -> None:
        self._engine = engine
        self._own = dict(engine.own_weights())
        self._names: list[str] = []
        """Names of the tensors of this weight sync, in the order of arrival."""
        self._converted: dict[str, Tensor] = {}
        """Expected hashes of the tensors that have another dtype in the engine, after the conversion."""
        self.has_weights = False

    def begin_sync(self, shapes: Mapping[str, Shape]) -> None:
        # all of the engine's weights, or a subset if it already has all
        due = shapes.keys() & self._own.keys() if self.has_weights else self._own.keys()
        check_shapes(shapes, {name: tuple(self._own[name].shape) for name in due}, engine="the engine")
        self._names, self._converted = [], {}

    @torch.no_grad()
    def receive_weights(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        for name, tensor in bucket:
            own = self._own[name]
            if not own.untyped_storage().nbytes():
                own.untyped_storage().resize_(own.nbytes)  # the engine freed it when it went to sleep
            own.copy_(tensor)
            self._names.append(name)
            if tensor.dtype != own.dtype:
                self._converted[name] = bit_hash(tensor.to(own.dtype))

    def hashes(self) -> list[Tensor]:
        """Hashes of this weight sync's tensors in the engine, then hashes of the sent tensors that had to be converted.

        Call this after the last tensor has arrived, since a tensor that shares memory with another may be overwritten.
        """
        return [*(bit_hash(self._own[name]) for name in self._names), *self._converted.values()]

    def compare(self, sent: Sequence[int], numbers: Sequence[int]) -> None:
        """Compare the values of `hashes` with the hashes of the tensors sent; raises EngineError if one differs."""
        held, converted = numbers[: len(self._names)], numbers[len(self._names) :]
        due = dict(zip(self._names, sent, strict=True)) | dict(zip(self._converted, converted, strict=True))
        differing = [name for name, number in zip(self._names, held, strict=True) if number != due[name]]
        if differing:
            raise EngineError(
                f"the weight {differing[0]} differs between trainer and engine after it was copied; run again, and "
                "report this as a bug if it happens again"
            )

    def finish_sync(self, version: int) -> None:
        """Make the engine use its tensors, which `read_compared` has compared."""
        self._engine.load_weights(self._own, version)
        self.has_weights = True


def read_compared(hashes: Sequence[Tensor], receivers: Sequence[object]) -> list[int]:
    """Read the hashes of the tensors sent, and compare them with those in copies of the network, in one device read."""
    copies = [receiver for receiver in receivers if isinstance(receiver, NetworkCopy)]
    sent, *found = read_hashes(hashes, *(copy.hashes() for copy in copies))
    for copy, numbers in zip(copies, found, strict=True):
        copy.compare(sent, numbers)
    return sent


def in_buckets(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Group the tensors into lists; a list ends with the tensor that brings it to BUCKET_BYTES or more."""
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
