"""What a process that trains holds in all phases, by the backend of the settings."""

from __future__ import annotations

from fovea.config.run import Config
from fovea.plan import megatron, states
from fovea.plan.activations import Numerics
from fovea.plan.model_sizes import ModelSizes
from fovea.plan.roles import Roles
from fovea.plan.states import States


def held_states(config: Config, sizes: ModelSizes, roles: Roles, numerics: Numerics) -> States:
    """Bytes by part, without those of the engine."""
    if roles.is_divided:
        return megatron.held_states(config, sizes, roles, numerics)
    return states.held_states(config, sizes, roles.trainers, numerics)
