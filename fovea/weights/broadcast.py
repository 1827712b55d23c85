"""Weights from a policy to the engines of other processes, over a process group of torch.distributed.

Its first rank sends; each of the others gives them to its engine. Tensors travel in buckets of bounded
size, as bytes behind a header in JSON with their names, shapes and types; their hashes follow the last bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fovea.models.outgoing import OutgoingWeight
from fovea.train.ranks import Ranks
from fovea.train.torch.sharding import full
from fovea.types import Shape
from fovea.utils.checksum import bit_hash, combined, read_hashes
from fovea.weights.base import SyncReport
from fovea.weights.local import Caller
from fovea.weights.to_engine import WeightTaker

BUCKET_BYTES = 1 << 26
"""Enough that the time of a transfer is that of its bytes, and little beside a layer of a large model."""
NO_PAIRS: Mapping[int, Ranks] = MappingProxyType({})


class Sender:
    """A `WeightTaker` on the first rank, which passes the tensors on to the others."""

    def __init__(self, ranks: Ranks, pairs: Mapping[int, Ranks] = NO_PAIRS) -> None:
        """`pairs` are the ranks of this process and one receiver each, by the receiver's rank among all workers."""
        self._groups = [ranks]
        self._pairs = pairs
        self._bucket: list[tuple[str, Tensor]] = []
        self._bucket_bytes = 0
        self._bytes = 0

    @property
    def needs_all(self) -> bool:
        return False  # `StreamedWeights` knows whether it has sent all

    def leave_out_lost(self, left: Sequence[int]) -> None:
        """Send only to those receivers that are left, by rank, to one after the other."""
        self._groups = [self._pairs[rank] for rank in left]

    def begin(self, shapes: Mapping[str, Shape]) -> None:
        # what a push that failed has left is of older weights
        self._bucket, self._bucket_bytes, self._bytes = [], 0, 0
        for ranks in self._groups:
            ranks.gather(shapes)
            # raises what a receiver has against them
            ranks.run_on_each(lambda: None)

    def take(self, name: str, tensor: Tensor) -> None:
        self._bucket.append((name, tensor))
        self._bucket_bytes += tensor.nbytes
        if self._bucket_bytes >= BUCKET_BYTES:
            self._flush()

    def finish(self, version: int, sent: Sequence[Tensor]) -> SyncReport:
        if self._bucket:
            self._flush()
        (bits,) = read_hashes(sent)
        for ranks in self._groups:
            ranks.gather(None)
            ranks.gather(bits)
            ranks.run_on_each(lambda: None)
        return SyncReport(version=version, num_tensors=len(bits), bytes_copied=self._bytes, checksum=combined(bits))

    def _flush(self) -> None:
        header = [[name, list(x.shape), str(x.dtype).removeprefix("torch.")] for name, x in self._bucket]
        payload = torch.cat([x.contiguous().flatten().view(torch.uint8) for _, x in self._bucket])
        for ranks in self._groups:
            ranks.gather(header)
            _broadcast(payload.to(_device(ranks)), ranks)
        self._bytes += len(payload)
        self._bucket, self._bucket_bytes = [], 0


class ReceivedWeights:
    """The weight sync of a worker that holds only an engine; its pushes run while the policy's workers make theirs."""

    def __init__(self, ranks: Ranks, taker: WeightTaker, pair: Ranks | None = None) -> None:
        """`pair` are the ranks of the sender and this process."""
        self._ranks = ranks
        self._taker = taker
        self._pair = pair

    async def leave_out_lost(self, left: Sequence[int]) -> None:
        """Receive from the sender in the pair with it, since one of the other receivers is lost."""
        assert self._pair is not None, f"one of two receivers or more was lost, and this one has no pair: {left}"
        self._ranks = self._pair

    async def push(self, version: int) -> SyncReport:
        shapes = {name: tuple(shape) for name, shape in self._ranks.gather(None)[0].items()}
        self._ranks.run_on_each(lambda: self._taker.begin(shapes))
        while (header := self._ranks.gather(None)[0]) is not None:
            for name, tensor in self._bucket(header):
                self._taker.take(name, tensor)
        sent = list(torch.tensor(self._ranks.gather(None)[0], dtype=torch.int64))
        reports: list[SyncReport] = []
        self._ranks.run_on_each(lambda: reports.append(self._taker.finish(version, sent)))
        return reports[0]

    def _bucket(self, header: list[Any]) -> Iterator[tuple[str, Tensor]]:
        tensors = [
            torch.empty(shape, dtype=getattr(torch, dtype), device=_device(self._ranks)) for _, shape, dtype in header
        ]
        payload = torch.empty(sum(x.nbytes for x in tensors), dtype=torch.uint8, device=_device(self._ranks))
        _broadcast(payload, self._ranks)
        parts = payload.split([x.nbytes for x in tensors])
        for (name, _, _), tensor, part in zip(header, tensors, parts, strict=True):
            # copied out: in the payload a tensor may begin at a place that its type cannot be read from
            tensor.flatten().view(torch.uint8).copy_(part)
            yield name, tensor


def _broadcast(payload: Tensor, ranks: Ranks) -> None:
    assert ranks.mesh is not None
    dist.broadcast(payload, group_src=0, group=ranks.mesh.get_group())


def _device(ranks: Ranks) -> str:
    assert ranks.mesh is not None
    return ranks.mesh.device_type


class StreamedWeights:
    """Gathers the tensors of a policy one by one, and gives each to this worker's takers before the next.

    The first push brings all weights, later ones those that training changes: not a frozen tower, and with LoRA the
    only the adapters where the engine takes them. The one after a push that failed brings all weights again. All ranks
    of the policy make the same pushes.
    """

    def __init__(
        self,
        weights: Callable[[], Iterable[OutgoingWeight]],
        dtype: torch.dtype,
        takers: Sequence[WeightTaker],
        call: Caller,
    ) -> None:
        """`dtype` is that of the engines' weights; the policy's shards may be of another.

        `call` makes the calls of the policy, whose collectives must not mix with those of a push.
        """
        self._weights = weights
        self._dtype = dtype
        self._takers = takers
        self._call = call
        self._sent_all = False

    async def leave_out_lost(self, left: Sequence[int]) -> None:
        """Send only to the remaining engines elsewhere, by rank among all workers."""
        for taker in self._takers:
            if isinstance(taker, Sender):
                taker.leave_out_lost(left)

    async def push(self, version: int) -> SyncReport:
        report: SyncReport = await self._call(self._push, version)
        return report

    def _push(self, version: int) -> SyncReport:
        sends_all = not self._sent_all or any(taker.needs_all for taker in self._takers)
        sent = [weight for weight in self._weights() if weight.is_trained or sends_all]
        self._sent_all = False
        for taker in self._takers:
            taker.begin({weight.name: weight.shape for weight in sent})
        hashes: list[Tensor] = []
        for weight in sent:
            tensor = full(weight.tensor(), self._dtype).contiguous()
            hashes += [bit_hash(tensor)] if self._takers else []
            for taker in self._takers:
                taker.take(weight.name, tensor)
        reports = [taker.finish(version, hashes) for taker in self._takers]
        self._sent_all = True
        return reports[0] if reports else SyncReport(version=version, num_tensors=len(sent), bytes_copied=0)
