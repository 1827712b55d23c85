"""Builders of what trains by Megatron: its packages are imported where they are chosen."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from fovea.config.backends import MegatronBackend
from fovea.config.model import Model
from fovea.config.run import Config
from fovea.models.outgoing import OutgoingWeight
from fovea.train.base import PolicyWorker


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


class SavedWeights(Protocol):
    """Weights of a policy, read from a checkpoint."""

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """Every weight whole, under its Hugging Face name, adapters beside them."""
        ...

    @property
    def left_out(self) -> tuple[str, ...]:
        """Names of what the checkpoint holds besides: a value function."""
        ...


def trains_with_megatron(config: Config) -> bool:
    """True if Megatron holds the policy, in a separate layout that no engine samples with."""
    return isinstance(config.train.backend, MegatronBackend)


def make_megatron_policy(config: Config, model: Model, banned_ids: Sequence[int]) -> PushedPolicy:
    """Make this process's part of a policy under Megatron, which all processes that train do together."""
    # imported here, since the packages may be absent; the module names what to install
    module = importlib.import_module("fovea.train.megatron.policy")
    made: PushedPolicy = module.MegatronPolicy(config, model, banned_ids)
    return made


def saved_by_megatron(config: Config, model: Model, banned_ids: Sequence[int], checkpoint: Path) -> SavedWeights:
    """Read the weights of a checkpoint only in this process, however many have written it."""
    alone = config.train.model_copy(update={"backend": MegatronBackend()})
    # imported here, since the packages may be absent; the module names what to install
    module = importlib.import_module("fovea.train.megatron.policy")
    saved: SavedWeights = module.MegatronSavedPolicy.read(
        config.model_copy(update={"train": alone}), model, banned_ids, checkpoint
    )
    return saved
