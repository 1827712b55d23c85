"""The weights of a Megatron checkpoint in one process, for evaluation and export."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.core import parallel_state
from torch import Tensor

from fovea.config.model import Model
from fovea.config.run import Config
from fovea.train.megatron.checkpoint import load_weights
from fovea.train.megatron.model import MegatronModel, skeleton
from fovea.train.megatron.parallel import ParallelRank


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronSavedPolicy:
    """Weights of a policy, read from a checkpoint."""

    weights: Mapping[str, Tensor]
    """Every weight whole, under its Hugging Face name, adapters beside them."""
    left_out: tuple[str, ...]
    """Names of what the checkpoint holds besides: a value function."""

    @staticmethod
    def read(config: Config, settings: Model, banned_ids: Sequence[int], checkpoint: Path) -> MegatronSavedPolicy:
        """Read them through a model that nothing is divided in (`config`), and the bridge's conversion.

        TrainError where they belong to another model.
        """
        shape = skeleton(settings, banned_ids, config.seed)
        try:
            model = MegatronModel(config, settings, shape, ParallelRank.setup(config, shape.device))
            left_out = load_weights(checkpoint, model.chunk)
            weights = {weight.name: weight.parameter for weight in model.outgoing()}
            return MegatronSavedPolicy(weights=weights, left_out=left_out)
        finally:
            parallel_state.destroy_model_parallel()
