"""The processes that train one model together, and what they tell each other besides weights and gradients.

Every rank makes the same calls with the same batch, so that each can work out by itself who does what; only what a rank
alone has seen (sums, names, log-probs of its own rows) is exchanged.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fovea.errors import TrainError


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """All ranks as one of them sees them. By default a process by itself, for which every exchange is free."""

    rank: int = 0
    size: int = 1
    mesh: DeviceMesh | None = None
    """The ranks in a row, to shard weights over; None for a process by itself."""

    @staticmethod
    def of_process_group(device: str) -> Ranks:
        """All processes of torch.distributed's default group, with weights on `device` ("cpu" or "cuda")."""
        size = dist.get_world_size()
        return Ranks(rank=dist.get_rank(), size=size, mesh=init_device_mesh(device, (size,)))

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank, in their order; of what JSON can hold."""
        if self.mesh is None:
            return [value]
        # no pickle: what arrives is data
        message = np.frombuffer(json.dumps(value).encode(), dtype=np.uint8)
        sizes = self._all(torch.tensor([len(message)]))
        padded = np.zeros(max(map(int, sizes)), dtype=np.uint8)
        padded[: len(message)] = message
        messages = self._all(torch.from_numpy(padded))
        return [json.loads(x[: int(n)].numpy().tobytes()) for x, n in zip(messages, sizes, strict=True)]

    def fill(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """The array of which every rank has filled places of its own and left 0 elsewhere."""
        if self.mesh is None:
            return values
        summed = torch.from_numpy(values).to(self.mesh.device_type)
        dist.all_reduce(summed, group=self.mesh.get_group())
        return summed.cpu().numpy()

    def first_does(self, action: Callable[[], None]) -> None:
        """Wait for what the first rank does; where that fails, all fail."""
        self.each_does(action if self.is_first else _nothing)

    def each_does(self, action: Callable[[], None]) -> None:
        """Do something that may fail on one rank: then all fail, instead of waiting for that one for ever."""
        if self.mesh is None:
            return action()
        error: Exception | None = None
        try:
            action()
        except Exception as caught:
            error = caught
        told = self.gather(None if error is None else str(error))
        if error is not None:
            raise error
        failed = [f"rank {rank}: {message}" for rank, message in enumerate(told) if message is not None]
        if failed:
            raise TrainError(failed[0])

    def _all(self, mine: Tensor) -> list[Tensor]:
        """Of every rank, on the CPU."""
        assert self.mesh is not None
        mine = mine.to(self.mesh.device_type)
        out = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(out, mine, group=self.mesh.get_group())
        return [x.cpu() for x in out]


ALONE = Ranks()
"""The one rank of a process by itself."""


def _nothing() -> None:
    """What a rank does while the first one works."""
