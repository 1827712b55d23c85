"""The roles of a run's workers by rank, and the process groups that they form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fovea.config.sections import Cluster
from fovea.train.ranks import ALONE, Ranks, check_replicas
from fovea_gym.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The division of workers: the first are learners; the last `num_engines_only` hold only an engine."""

    num_learners: int
    num_engines_only: int
    learners_generate: bool
    """True if learners hold an engine too."""
    replicas: int = 1
    """Number of groups of learners, each of which holds all weights."""

    @staticmethod
    def of(cluster: Cluster, num_workers: int, replicas: int = 1) -> Placement:
        """The placement of the workers; ConfigError if none trains, or `replicas` does not divide the learners."""
        num_learners = num_workers - cluster.rollout_gpus
        if num_learners < 1:
            raise ConfigError(
                f"cluster.rollout_gpus={cluster.rollout_gpus} only generate, but there are {num_workers} processes in "
                "all, so none would train; lower it, start more processes (torchrun --nproc-per-node), or set "
                "cluster.gpus_per_node to have Ray start them"
            )
        check_replicas(replicas, num_learners)
        return Placement(
            num_learners=num_learners,
            num_engines_only=cluster.rollout_gpus,
            learners_generate=cluster.placement != "disaggregated",
            replicas=replicas,
        )

    @property
    def ranks_of_engines(self) -> range:
        """Ranks of the workers that hold only an engine."""
        return range(self.num_learners, self.num_learners + self.num_engines_only)

    def learners(self, workers: Sequence[T]) -> Sequence[T]:
        """The workers that hold a shard of the policy, ordered by rank."""
        return workers[: self.num_learners]

    def engines(self, workers: Sequence[T]) -> Sequence[T]:
        """The workers that hold an engine."""
        return workers if self.learners_generate else workers[self.num_learners :]


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """The parts that one worker holds, and its ranks in collective calls."""

    everyone: Ranks
    """Ranks of all workers."""
    learners: Ranks | None
    """Ranks of the learners; None for a worker without a shard of the policy."""
    receivers: Ranks | None
    """Ranks of the first learner, which sends weights, and of the workers with only an engine; None for others."""
    pairs: Mapping[int, Ranks]
    """Ranks of the first learner and one worker with only an engine, by that worker's rank: for weight syncs after an
    engine was lost, since making a new process group would need all processes."""
    has_engine: bool
    in_thread: bool
    """True if the policy's calls run in a separate thread, since engines may generate meanwhile."""
    is_alone: bool = False
    """True if this process is the whole run, so that rollout and update may share memory and activations."""

    @staticmethod
    def alone() -> Role:
        """The role of a run in one process."""
        return Role(
            everyone=ALONE,
            learners=ALONE,
            receivers=None,
            pairs={},
            has_engine=True,
            in_thread=False,
            is_alone=True,
        )

    @staticmethod
    def of(placement: Placement, device: str, timeout: timedelta) -> Role:
        """The role of this process in the default process group; all of its processes must make this call.

        `timeout` applies to collective calls of the new process groups.
        """
        rank = dist.get_rank()
        is_learner = rank < placement.num_learners
        learners = Ranks.of_process_group(device, placement.num_learners, replicas=placement.replicas, timeout=timeout)
        return Role(
            everyone=Ranks.of_process_group(device, timeout=timeout),
            learners=learners if is_learner else None,
            receivers=_receivers(placement, device, timeout),
            pairs=_pairs(placement, device, timeout),
            has_engine=placement.learners_generate or not is_learner,
            in_thread=placement.num_engines_only > 0,
        )


def _receivers(placement: Placement, device: str, timeout: timedelta) -> Ranks | None:
    if not placement.num_engines_only:
        return None
    return _group_of([0, *placement.ranks_of_engines], device, timeout)


def _pairs(placement: Placement, device: str, timeout: timedelta) -> Mapping[int, Ranks]:
    if placement.num_engines_only < 2:
        return {}  # losing the only such engine ends the run, or leaves nobody to send to
    groups = {rank: _group_of([0, rank], device, timeout) for rank in placement.ranks_of_engines}
    return {rank: group for rank, group in groups.items() if group is not None}


def _group_of(members: list[int], device: str, timeout: timedelta) -> Ranks | None:
    """Make a process group of these members; every process must make this call. None for other processes."""
    group = dist.new_group(members, timeout=timeout)
    if dist.get_rank() not in members:
        return None
    mesh = DeviceMesh.from_group(group, device)
    return Ranks(rank=members.index(dist.get_rank()), size=len(members), mesh=mesh)
