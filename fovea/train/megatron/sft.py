"""Supervised fine-tuning of a Megatron model: the warm-up before RL."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from fovea.config.run import Config
from fovea.models.policy_network import PolicyNetwork
from fovea.models.token_logprobs import TokenScores
from fovea.train.base import Pair
from fovea.train.megatron.optimizer import MegatronOptimizer
from fovea.train.megatron.parallel import Place
from fovea.train.megatron.passes import Passes
from fovea.train.supervised import (
    BETAS,
    EPS,
    MAX_GRAD_NORM,
    WEIGHT_DECAY,
    SupervisedSteps,
    cross_entropy,
    row_of_share,
)


class SupervisedTrainer(SupervisedSteps):
    """The steps by Megatron's passes, with a separate optimizer."""

    def __init__(
        self, config: Config, shape: PolicyNetwork, training: DistributedDataParallel, passes: Passes, place: Place
    ) -> None:
        """`passes` run the model under training at temperature 1."""
        assert config.warmup is not None, "supervised steps, but the policy was made without settings for them"
        super().__init__(shape.banned_ids)
        self._shape = shape
        self._training = training
        self._passes = passes
        self._place = place
        settings = config.train.model_copy(
            update={
                "learning_rate": config.warmup.learning_rate,
                "lr_warmup_steps": config.warmup.lr_warmup_steps,
                "lr_schedule": "constant",
                "final_lr_frac": 1.0,
                "betas": BETAS,
                "adam_eps": EPS,
                "weight_decay": WEIGHT_DECAY,
                "max_grad_norm": MAX_GRAD_NORM,
            }
        )
        self._optimizer = MegatronOptimizer(training, settings, max_steps=config.warmup.max_steps, dtype=shape.dtype)

    def _gradients(self, pairs: Sequence[Pair]) -> float:
        self._optimizer.zero_grad()
        parts: list[Tensor] = []

        def loss(scores: TokenScores) -> Tensor:
            part = cross_entropy(scores.logprobs_A, pairs)
            parts.append(part.detach())
            return part

        self._training.train()
        self._passes.backward_of_row(row_of_share(self._shape, pairs, self._place.dealt), loss)
        self._training.eval()
        # stages before the last one have no part
        total: float = sum(self._place.results.gather(float(torch.stack(parts).sum()) if parts else 0.0))
        return total

    def _take_step(self) -> None:
        self._optimizer.set_rate(self._steps)
        self._optimizer.step()
