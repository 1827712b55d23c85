"""Supervised fine-tuning by Megatron's passes, with a separate optimizer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fovea.config.sections import Warmup
from fovea.models.token_logprobs import TokenScores
from fovea.train.adamw import AdamWSettings
from fovea.train.base import SftExample
from fovea.train.megatron.optimizer import MegatronOptimizer
from fovea.train.megatron.passes import MegatronPasses
from fovea.train.sft import SupervisedTrainer, cross_entropy, row_of_share


def supervised_trainer(passes: MegatronPasses, settings: Warmup, *, offload: bool) -> SupervisedTrainer:
    """A trainer of the model of `passes`, which run it at temperature 1; `offload` as in `MegatronOptimizer`."""
    model, training = passes.model, passes.training
    assert training is not None, "supervised steps of a model that is not trained"

    def backward(pairs: Sequence[SftExample], _step: int) -> float:
        parts: list[Tensor] = []

        def loss(scores: TokenScores) -> Tensor:
            part = cross_entropy(scores.logprobs_A, pairs)
            parts.append(part.detach())
            return part

        training.train()
        passes.backward_of_row(row_of_share(model.shape, pairs, model.place.data), loss)
        training.eval()
        # stages before the last one have no part
        return float(torch.stack(parts).sum()) if parts else 0.0

    optimizer = MegatronOptimizer(training, AdamWSettings.of_warmup(settings), dtype=model.shape.dtype, offload=offload)
    return SupervisedTrainer(optimizer, backward, ranks=model.place.results, banned_ids=model.shape.banned_ids)
