"""Bytes that a training process holds in all phases, by the backend of the settings."""

from __future__ import annotations

from fovea.config.run import Config
from fovea.tools.plan import megatron, states
from fovea.tools.plan.activations import Numerics
from fovea.tools.plan.model_sizes import ModelSizes
from fovea.tools.plan.states import States
from fovea.tools.plan.workload import Roles


def held_states(config: Config, sizes: ModelSizes, roles: Roles, numerics: Numerics) -> States:
    """Bytes by part, without those of the engine."""
    if roles.is_divided:
        return megatron.held_states(config, sizes, roles, numerics)
    return states.held_states(config, sizes, roles.trainers, numerics)
