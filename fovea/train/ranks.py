"""Collective communication between the ranks of a policy, except for weights and gradients (FSDP2).

Every rank makes the same calls with the same batch and computes the assignment of work without communication. Only
results that a single rank has (sums, task ids, log-probs of its own rows) are exchanged.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fovea.errors import TrainError
from fovea.utils.host_waits import awaited
from fovea_gym.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Rank, size and mesh of a process group. By default a single process, in which collectives do nothing."""

    rank: int = 0
    size: int = 1
    mesh: DeviceMesh | None = None
    """One-dimensional mesh of all ranks; None for a single process."""
    replicated: DeviceMesh | None = None
    """Mesh [replicas, ranks of a replica] of the same ranks; None with a single replica."""

    @staticmethod
    def of_process_group(
        device: str, size: int | None = None, *, replicas: int = 1, timeout: timedelta | None = None
    ) -> Ranks:
        """The first `size` ranks of torch.distributed's default group, with weights on `device` ("cpu" or "cuda").

        Consecutive ranks form a replica. All processes of the group must make this call; those beyond `size` must not
        use the result. `timeout` applies to collective calls among some ranks of the group (default: torch's); calls
        among all ranks have the group's timeout. ConfigError if the replicas would differ in their number of ranks.
        """
        size = dist.get_world_size() if size is None else size
        check_replicas(replicas, size)
        if size == 1:
            return Ranks(rank=dist.get_rank())
        mesh = _mesh(device, torch.arange(size), ("rank",), timeout)
        replicated = None
        if replicas > 1:
            replicated = _mesh(device, torch.arange(size).view(replicas, -1), ("replicate", "shard"), timeout)
        return Ranks(rank=dist.get_rank(), size=size, mesh=mesh, replicated=replicated)

    @property
    def weights_mesh(self) -> DeviceMesh | None:
        """Mesh over which weights are sharded along the last axis, and replicated along the first if there are two."""
        return self.mesh if self.replicated is None else self.replicated

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
        # adding zeros is exact, so an all-reduce merges the arrays
        summed = torch.from_numpy(values).to(self.mesh.device_type)
        dist.all_reduce(summed, group=self.mesh.get_group())
        return awaited(summed).cpu().numpy()

    def run_on_first(self, action: Callable[[], None]) -> None:
        """Run an action on the first rank while the others wait; if it fails, all ranks raise."""
        self.run_on_each(action if self.is_first else lambda: None)

    def run_on_each(self, action: Callable[[], None]) -> None:
        """Run an action that may fail on some ranks; if one fails, all ranks raise instead of waiting forever."""
        if self.mesh is None:
            return action()
        error: Exception | None = None
        try:
            action()
        except Exception as caught:
            error = caught
        errors = self.gather(None if error is None else str(error))
        if error is not None:
            raise error
        failed = [f"rank {rank}: {message}" for rank, message in enumerate(errors) if message is not None]
        if failed:
            raise TrainError(failed[0])

    def _all(self, mine: Tensor) -> list[Tensor]:
        """All-gather a tensor of the same shape on all ranks; the results are on the CPU."""
        assert self.mesh is not None
        mine = mine.to(self.mesh.device_type)
        out = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(out, mine, group=self.mesh.get_group())
        return [awaited(x).cpu() for x in out]


def check_replicas(replicas: int, num_ranks: int) -> None:
    """ConfigError unless the ranks can be divided into `replicas` groups of equal size."""
    if num_ranks % replicas:
        fitting = [n for n in range(1, num_ranks + 1) if num_ranks % n == 0]
        raise ConfigError(
            f"train.backend.replicas={replicas} does not divide the number of training processes, {num_ranks}; set it "
            f"to {', '.join(map(str, fitting[:-1]))}{' or ' if fitting[:-1] else ''}{fitting[-1]}"
        )


ALONE = Ranks()
"""The only rank of a single process."""


def _mesh(device: str, ranks: Tensor, names: tuple[str, ...], timeout: timedelta | None) -> DeviceMesh | None:
    """Mesh of these ranks, with a process group for each line along each axis; None in a process outside of it."""
    # torch's init_device_mesh would give its groups torch's default timeout
    lines = [ranks.movedim(axis, -1).reshape(-1, ranks.shape[axis]) for axis in range(ranks.ndim)]
    groups = [_group_of_mine(each.tolist(), timeout) for each in lines]
    if dist.get_rank() not in ranks:
        return None
    return DeviceMesh.from_group(groups, device, mesh=ranks, mesh_dim_names=names)


def _group_of_mine(lines: list[list[int]], timeout: timedelta | None) -> Any:
    """The process group of the line of ranks that contains this rank."""
    if len(lines[0]) == dist.get_world_size():
        return dist.group.WORLD
    mine, _ = dist.new_subgroups_by_enumeration(lines, timeout=timeout)
    return mine
