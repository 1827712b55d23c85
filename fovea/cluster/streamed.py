"""Weight sync of a worker that holds a policy, or a shard of it: its tensors one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from fovea.cluster.broadcast import Sender
from fovea.cluster.engine_copy import WeightTaker
from fovea.cluster.local import Caller
from fovea.cluster.weights import SyncReport
from fovea.models.outgoing import OutgoingWeight
from fovea.train.torch.sharding import full
from fovea.utils.checksum import bit_hash


class StreamedWeights:
    """Gathers the tensors of a policy one by one, and gives each to this worker's takers before the next.

    The first push brings all weights, later ones those that training changes: not a frozen tower, and with LoRA the
    adapters alone where the engine takes them. The one after a push that failed brings all weights again. All ranks of
    the policy make the same pushes.
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
        """Send to those engines elsewhere alone that are left, by rank among all workers."""
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
