"""The record that settings make a policy from, and the interface of that policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from fovea.config.model import Model
from fovea.config.run import Config
from fovea.models.activation_tape import Tape
from fovea.models.outgoing import OutgoingWeight
from fovea.models.policy_network import PolicyNetwork
from fovea.train.base import PolicyWorker
from fovea.train.ranks import ALONE, Ranks


class PushedPolicy(PolicyWorker, Protocol):
    """A policy whose weights are pushed to engines tensor by tensor."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of the engines' weights."""
        ...

    def free_first(self, free_beside: Callable[[], bool]) -> None:
        """Set the function that frees memory before micro-batches become smaller."""
        ...

    def outgoing_merged(self) -> Iterable[OutgoingWeight]:
        """The weights for an engine that knows no adapters."""
        ...


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
