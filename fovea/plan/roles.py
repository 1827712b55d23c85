"""Which GPUs train and which generate, by `cluster.placement`."""

from __future__ import annotations

from dataclasses import dataclass

from fovea.config.run import Config
from fovea.errors import ConfigError
from fovea.train.ranks import check_replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """Numbers of GPUs by what they do."""

    trainers: int
    engines: int
    apart: bool
    """True if the GPUs that train generate nothing."""

    @property
    def shares_tensors(self) -> bool:
        """True in a single process, whose engine samples with the policy's own tensors."""
        return self.trainers == self.engines == 1 and not self.apart


def roles_of(config: Config, gpus: int) -> Roles:
    """The roles of so many GPUs; ConfigError where none is left to train, or replicas do not divide those that do."""
    cluster = config.cluster
    trainers = gpus - cluster.rollout_gpus
    if trainers < 1:
        raise ConfigError(
            f"cluster.rollout_gpus={cluster.rollout_gpus} leaves none of {gpus} GPUs to train; lower it, or raise "
            "plan.gpus"
        )
    check_replicas(config.train.backend.replicas, trainers)
    apart = cluster.placement == "disaggregated"
    return Roles(trainers=trainers, engines=cluster.rollout_gpus if apart else gpus, apart=apart)
