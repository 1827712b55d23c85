"""The processes of a run: their number, and which of them hold the policy, an engine, or both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import model_validator

from fovea.config.base import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section, refuse


class Cluster(Section):
    """Worker processes of a run, one per GPU; on CPUs a GPU stands for one process (docs/several_processes.md)."""

    num_nodes: PositiveInt = 1
    """Machines of the Ray cluster that the run takes GPUs of."""
    gpus_per_node: PositiveInt | None = None
    """GPUs on each of them. Set: Ray starts a worker for each. Default: one process, or those that torchrun started."""
    wait_minutes: NonNegativeFloat = 1.0
    """Time for which a run waits for free GPUs of a Ray cluster, whose nodes may still be joining or hold other runs;
    0: none."""
    placement: Literal["collocated", "disaggregated", "hybrid"] = "collocated"
    """Use of the GPUs. collocated: each trains and generates in turn; disaggregated: rollout_gpus of them generate and
    the others train; hybrid: rollout_gpus of them generate and the others do both in turn."""
    rollout_gpus: NonNegativeInt = 0
    """GPUs that only generate; for disaggregated and hybrid."""

    heartbeat_timeout_seconds: PositiveFloat = 60.0
    """Silence after which a worker process counts as hung: it is killed, and the run ends (docs/faults.md)."""
    collective_timeout_seconds: PositiveFloat = 1800.0
    """Longest time for which a rank waits for the others in a collective call; then the run ends."""

    @property
    def num_ray_workers(self) -> int:
        """Workers that Ray starts; 0: none."""
        return 0 if self.gpus_per_node is None else self.num_nodes * self.gpus_per_node

    @model_validator(mode="after")
    def _settings_agree(self) -> Cluster:
        refuse(_disagreements(self))
        return self


def _disagreements(cluster: Cluster) -> Iterator[str]:
    if cluster.num_nodes > 1 and cluster.gpus_per_node is None:
        yield (
            f"cluster.num_nodes={cluster.num_nodes} needs Ray, which starts as many workers per machine as "
            "cluster.gpus_per_node says; set it"
        )
    if cluster.placement == "collocated" and cluster.rollout_gpus:
        yield (
            f"cluster.rollout_gpus={cluster.rollout_gpus} are to generate alone, but in cluster.placement=collocated "
            "every GPU trains too; set cluster.placement=disaggregated or hybrid, or leave rollout_gpus out"
        )
    if cluster.placement != "collocated" and not cluster.rollout_gpus:
        yield (
            f"cluster.placement={cluster.placement} needs GPUs that only generate; set cluster.rollout_gpus to their "
            "number"
        )
    workers = cluster.num_ray_workers
    if 0 < workers <= cluster.rollout_gpus:
        yield (
            f"cluster.rollout_gpus={cluster.rollout_gpus} leaves none of {workers} GPUs to train; lower it, or raise "
            "cluster.gpus_per_node or cluster.num_nodes"
        )
