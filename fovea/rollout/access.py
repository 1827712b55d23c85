"""The record that settings make an engine from."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from fovea.config.model import Model
from fovea.models.activation_tape import Tape
from fovea.models.policy_network import PolicyNetwork
from fovea.models.processor import Processor


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAccess:
    """The model, for an engine that holds its weights; a network and its place, for one that shares weights."""

    model: Model
    """With a path."""
    processor: Processor
    max_model_len: int
    """Tokens of the longest prompt with its completion."""
    seed: int
    network: PolicyNetwork | None = None
    """The network that an engine samples with which shares weights."""
    synced: Collection[str] = ()
    """Weights that every weight sync brings, whose memory is the update's while the engine sleeps."""
    can_free_memory: bool = False
    """True if an update that runs out of memory frees what the engine keeps, and goes on."""
    tape: Tape | None = None
    """Records activations of the rollout for the update."""
