"""The record that settings make a policy from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fovea.config.model import Model
from fovea.config.run import Config
from fovea.models.activation_tape import Tape
from fovea.models.policy_network import PolicyNetwork
from fovea.train.ranks import ALONE, Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyAccess:
    """The settings of the run, and its model as a folder or as a network."""

    config: Config
    model: Model
    """With a path."""
    banned_ids: Sequence[int]
    network: PolicyNetwork | None = None
    """The network to train in place, for a backend that shares it."""
    tape: Tape | None = None
    """Activations of the rollout that the update reuses."""
    ranks: Ranks = ALONE
