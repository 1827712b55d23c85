"""Weight sync from a policy to engines in other processes, over a torch.distributed process group.

The first rank sends; each other rank passes the weights to its engine. A bucket is sent as a header with the names,
shapes and dtypes of its tensors, followed by their bytes. Both ends report a checksum, and the driver compares them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fovea.train.ranks import Ranks
from fovea.types import Shape
from fovea.utils.checksum import bit_hash, combined
from fovea.weights.base import SyncReport, WeightReceiver
from fovea.weights.sync import read_compared

NO_PAIRS: Mapping[int, Ranks] = MappingProxyType({})


class Broadcast:
    """A `WeightReceiver` on the first rank, which broadcasts the tensors to the other ranks (`ReceivedWeights`)."""

    has_weights = True
    """The receivers keep the weights; if their engines free them, `WeightSender` is made with `always_all`."""

    def __init__(self, ranks: Ranks, pairs: Mapping[int, Ranks] = NO_PAIRS) -> None:
        """`pairs` maps a receiver's rank among all workers to a process group of this process and that receiver."""
        self._groups = [ranks]
        self._pairs = pairs

    def leave_out_lost(self, left: Sequence[int]) -> None:
        """Send only to the remaining receivers, one after the other; `left` holds their ranks among all workers."""
        self._groups = [self._pairs[rank] for rank in left]

    def begin_sync(self, shapes: Mapping[str, Shape]) -> None:
        for ranks in self._groups:
            ranks.gather(shapes)
            # raises an error if a receiver refuses the shapes
            ranks.run_on_each(lambda: None)

    def receive_weights(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        header = [[name, list(x.shape), str(x.dtype).removeprefix("torch.")] for name, x in bucket]
        payload = torch.cat([x.flatten().view(torch.uint8) for _, x in bucket])
        for ranks in self._groups:
            ranks.gather(header)
            _broadcast(payload.to(_device(ranks)), ranks)

    def finish_sync(self, version: int) -> None:
        for ranks in self._groups:
            ranks.gather(None)  # no header: there are no more buckets
            ranks.run_on_each(lambda: None)


class ReceivedWeights:
    """The `WeightSync` of a worker that has only an engine; it runs while the policy's workers run theirs."""

    def __init__(self, ranks: Ranks, receiver: WeightReceiver, pair: Ranks | None = None) -> None:
        """`pair` is the process group of the sender and this process."""
        self._ranks = ranks
        self._receiver = receiver
        self._pair = pair

    async def leave_out_lost(self, left: Sequence[int]) -> None:
        """Receive over the `pair` group from now on, since another receiver is lost."""
        assert self._pair is not None, f"a receiver was lost, and this one shares no group with the sender: {left}"
        self._ranks = self._pair

    async def sync(self, version: int) -> SyncReport:
        shapes = {name: tuple(shape) for name, shape in self._ranks.gather(None)[0].items()}
        self._ranks.run_on_each(lambda: self._receiver.begin_sync(shapes))
        hashes: list[Tensor] = []
        num_bytes = 0
        while (header := self._ranks.gather(None)[0]) is not None:
            bucket = list(self._bucket(header))
            hashes += [bit_hash(tensor) for _, tensor in bucket]
            num_bytes += sum(tensor.nbytes for _, tensor in bucket)
            self._receiver.receive_weights(bucket)
        bits: list[int] = []

        def finish() -> None:
            bits.extend(read_compared(hashes, [self._receiver]))
            self._receiver.finish_sync(version)

        self._ranks.run_on_each(finish)
        return SyncReport(version=version, num_tensors=len(bits), bytes_copied=num_bytes, checksum=combined(bits))

    def _bucket(self, header: list[Any]) -> Iterator[tuple[str, Tensor]]:
        tensors = [
            torch.empty(shape, dtype=getattr(torch, dtype), device=_device(self._ranks)) for _, shape, dtype in header
        ]
        payload = torch.empty(sum(x.nbytes for x in tensors), dtype=torch.uint8, device=_device(self._ranks))
        _broadcast(payload, self._ranks)
        parts = payload.split([x.nbytes for x in tensors])
        for (name, _, _), tensor, part in zip(header, tensors, parts, strict=True):
            # copied out of the payload, where the tensor's offset may not be aligned for its dtype
            tensor.flatten().view(torch.uint8).copy_(part)
            yield name, tensor


def _broadcast(payload: Tensor, ranks: Ranks) -> None:
    assert ranks.mesh is not None
    dist.broadcast(payload, group_src=0, group=ranks.mesh.get_group())


def _device(ranks: Ranks) -> str:
    assert ranks.mesh is not None
    return ranks.mesh.device_type
