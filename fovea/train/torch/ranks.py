"""Collective communication between the ranks of a policy, apart from that of weights and gradients (FSDP2).

Every rank makes the same calls with the same batch, so that each derives the assignment of work by itself. Only results
that a single rank has (sums, task ids, log-probs of its own rows) are exchanged.
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
    """Rank, size and mesh of a process group. By default a single process, in which collectives do nothing."""

    rank: int = 0
    size: int = 1
    mesh: DeviceMesh | None = None
    """One-dimensional mesh of all ranks, over which weights are sharded; None for a single process."""

    @staticmethod
    def of_process_group(device: str) -> Ranks:
        """Ranks of torch.distributed's default group, with weights on `device` ("cpu" or "cuda")."""
        size = dist.get_world_size()
        return Ranks(rank=dist.get_rank(), size=size, mesh=init_device_mesh(device, (size,)))

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """All-gather a JSON value; returns the values of all ranks in order."""
        if self.mesh is None:
            return [value]
        # JSON, since torch's own all_gather_object would unpickle the messages
        message = np.frombuffer(json.dumps(value).encode(), dtype=np.uint8)
        # all_gather takes tensors of one size: lengths first, then messages padded to the longest
        sizes = self._all(torch.tensor([len(message)]))
        padded = np.zeros(max(map(int, sizes)), dtype=np.uint8)
        padded[: len(message)] = message
        messages = self._all(torch.from_numpy(padded))
        return [json.loads(x[: int(n)].numpy().tobytes()) for x, n in zip(messages, sizes, strict=True)]

    def merge_disjoint(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Merge arrays in which every rank has filled different elements and left 0 elsewhere."""
        if self.mesh is None:
            return values
        # adding zeros is exact, so that an all-reduce is a merge
        summed = torch.from_numpy(values).to(self.mesh.device_type)
        dist.all_reduce(summed, group=self.mesh.get_group())
        return summed.cpu().numpy()

    def run_on_first(self, action: Callable[[], None]) -> None:
        """Run an action on the first rank while the others wait; if it fails, all ranks raise."""
        self.run_on_each(action if self.is_first else _nothing)

    def run_on_each(self, action: Callable[[], None]) -> None:
        """Run an action that may fail on some ranks; if it does, all ranks raise instead of waiting for ever."""
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
        """All-gather a tensor of the same shape on all ranks; the results are on the CPU."""
        assert self.mesh is not None
        mine = mine.to(self.mesh.device_type)
        out = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(out, mine, group=self.mesh.get_group())
        return [x.cpu() for x in out]


ALONE = Ranks()
"""The only rank of a single process."""


def _nothing() -> None:
    """Do nothing: the action of a rank that waits for the first one."""
