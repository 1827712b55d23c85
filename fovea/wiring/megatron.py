"""Builders of objects that use Megatron, whose packages are imported only if the settings choose it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor

from fovea.config.backends import MegatronBackend
from fovea.config.model import Model
from fovea.config.run import Config


class SavedWeights(Protocol):
    """Weights of a policy, read from a checkpoint."""

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """All weights, unsharded, by their Hugging Face names, and the adapters."""
        ...

    @property
    def left_out(self) -> tuple[str, ...]:
        """Names of other contents of the checkpoint: a value function."""
        ...


def saved_by_megatron(config: Config, model: Model, banned_ids: Sequence[int], checkpoint: Path) -> SavedWeights:
    """Read the weights of a checkpoint in this process only, however many processes wrote it."""
    alone = config.train.model_copy(update={"backend": MegatronBackend()})
    # imported here, since the packages may be absent; the module names what to install
    module = importlib.import_module("fovea.train.megatron.policy")
    saved: SavedWeights = module.MegatronSavedPolicy.read(
        config.model_copy(update={"train": alone}), model, banned_ids, checkpoint
    )
    return saved
