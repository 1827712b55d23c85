"""Which GPUs train and which generate, by `cluster.placement`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fovea.config.backends import MegatronBackend
from fovea.config.run import Config
from fovea.errors import ConfigError
from fovea.train.model_division import check_processes
from fovea.train.ranks import check_replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """Numbers of GPUs by what they do."""

    trainers: int
    engines: int
    apart: bool
    """True if the GPUs that train generate nothing."""
    shares: int
    """Parts that micro-batches are dealt in: GPUs that train, or under Megatron groups of them with a whole model."""
    stages: int = 1
    """Pipeline stages that the layers are divided into."""
    stage: int = 0
    """The stage of the GPU that is planned."""
    is_divided: bool = False
    """True if Megatron holds the policy, in slices of its own that no engine samples with."""

    @property
    def shares_tensors(self) -> bool:
        """True in a single process, whose engine samples with the policy's own tensors."""
        return self.trainers == self.engines == 1 and not (self.apart or self.is_divided)


def roles_of(config: Config, gpus: int) -> Roles:
    """The roles of so many GPUs; ConfigError where none is left to train, or replicas do not divide those that do."""
    cluster = config.cluster
    trainers = gpus - cluster.rollout_gpus
    if trainers < 1:
        raise ConfigError(
            f"cluster.rollout_gpus={cluster.rollout_gpus} leaves none of {gpus} GPUs to train; lower it, or raise "
            "plan.gpus"
        )
    apart, backend = cluster.placement == "disaggregated", config.train.backend
    roles = Roles(trainers=trainers, engines=cluster.rollout_gpus if apart else gpus, apart=apart, shares=trainers)
    if not isinstance(backend, MegatronBackend):
        check_replicas(backend.replicas, trainers)
        return roles
    check_processes(backend, trainers)
    stages = backend.pipeline_parallel_size
    shares = trainers // (backend.tensor_parallel_size * stages)
    return replace(roles, shares=shares, stages=stages, is_divided=True)
