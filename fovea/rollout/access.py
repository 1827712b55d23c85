"""The objects from which engine settings construct an engine."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from fovea.config.model import Model
from fovea.models.activation_tape import Tape
from fovea.models.policy_network import PolicyNetwork
from fovea.models.processor import Processor


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAccess:
    """The model, for an engine with its own weights; the network, for an engine that shares the policy's weights."""

    model: Model
    """Model settings; the path is set."""
    processor: Processor
    max_model_len: int
    """Maximum length of a prompt and its completion together, in tokens."""
    seed: int
    network: PolicyNetwork | None = None
    """The network for an engine that shares the policy's weights."""
    synced: Collection[str] = ()
    """Names of the weights that every weight sync sends; the engine frees their memory while it sleeps."""
    can_free_memory: bool = False
    """True if an update that runs out of memory frees the engine's memory and continues."""
    tape: Tape | None = None
    """Records activations of the rollout for the update."""
