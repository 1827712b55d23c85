"""Builders of what trains by Megatron: its packages are imported where they are chosen."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from fovea.config.backends import MegatronBackend
from fovea.config.run import Config, Model
from fovea.models.outgoing import OutgoingWeight
from fovea.train.base import PolicyWorker


class PushedPolicy(PolicyWorker, Protocol):
    """A policy whose weights are pushed to engines tensor by tensor."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of the engines' weights."""
        ...

    def outgoing(self) -> Iterable[OutgoingWeight]:
        """The weights, adapters beside them."""
        ...

    def outgoing_merged(self) -> Iterable[OutgoingWeight]:
        """The weights for an engine that knows no adapters."""
        ...


def trains_with_megatron(config: Config) -> bool:
    """Whether Megatron holds the policy, in a layout of its own that no engine samples with."""
    return isinstance(config.train.backend, MegatronBackend)


def make_megatron_policy(config: Config, model: Model, banned_ids: Sequence[int]) -> PushedPolicy:
    """Make this process's part of a policy under Megatron, which all processes that train do together."""
    # imported here, since the packages may be absent; the module names what to install
    module = importlib.import_module("fovea.train.megatron.policy")
    made: PushedPolicy = module.MegatronPolicy(config, model, banned_ids)
    return made
