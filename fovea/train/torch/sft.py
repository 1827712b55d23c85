"""Supervised fine-tuning on prompts and answers: the warm-up of a randomly initialised model before RL."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fovea.config.sections import Warmup
from fovea.models.policy_network import PolicyNetwork
from fovea.models.trainable import trainable_parameters
from fovea.train.base import Pair
from fovea.train.optimizer_steps import learning_rate, make_adamw, set_learning_rate
from fovea.train.ranks import ALONE, Ranks
from fovea.train.supervised import (
    BETAS,
    EPS,
    MAX_GRAD_NORM,
    WEIGHT_DECAY,
    SupervisedSteps,
    cross_entropy,
    row_of_share,
)
from fovea.train.torch.forward import dropout_seed
from fovea.train.torch.optimizer import MasterWeights
from fovea.train.torch.sharding import shards_tower
from fovea.utils.host_waits import awaited


class SupervisedTrainer(SupervisedSteps):
    """The steps on float32 master weights, with a separate AdamW."""

    def __init__(
        self, vlm: PolicyNetwork, settings: Warmup, ranks: Ranks = ALONE, *, cpu_offload: bool = False
    ) -> None:
        """`cpu_offload` keeps master weights and moments in the host's memory, as `train.backend.cpu_offload` says."""
        super().__init__(vlm.banned_ids)
        self._vlm = vlm
        self._ranks = ranks
        self._settings = settings
        parameters = trainable_parameters(vlm)
        self._parameters = list(parameters.values())
        self._masters = MasterWeights(parameters, on_host=cpu_offload)
        self._optimizer = make_adamw(
            list(self._masters.by_name.values()), betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY
        )

    def _gradients(self, pairs: Sequence[Pair]) -> float:
        self._vlm.train()
        with dropout_seed(self._steps, self._ranks, self._vlm.device):
            part = self._loss(pairs)
        # text has no graph where only the vision has adapters: on all ranks, or on none
        if part.requires_grad:
            torch.autograd.backward(part)
        self._vlm.eval()
        total: float = sum(self._ranks.gather(float(awaited(part.detach()))))
        return total

    def _take_step(self) -> None:
        rate = learning_rate(
            self._steps,
            peak=self._settings.learning_rate,
            warmup_steps=self._settings.lr_warmup_steps,
            total_steps=self._settings.max_steps,
            shape="constant",
            final_frac=1.0,
        )
        set_learning_rate(self._optimizer, rate)
        torch.nn.utils.clip_grad_norm_(self._parameters, MAX_GRAD_NORM)
        self._masters.take_gradients()
        self._optimizer.step()
        self._masters.write_back()
        self._optimizer.zero_grad(set_to_none=True)

    def _loss(self, pairs: Sequence[Pair]) -> torch.Tensor:
        """This rank's summand of the loss."""
        # a rank without images must enter the same sharded modules as the others
        images = [image for pair in pairs for image in pair.prompt.images] if shards_tower(self._vlm) else []
        row = row_of_share(self._vlm, pairs, self._ranks, images)
        scores = self._vlm(row, temperature=1.0, chunk_tokens=max(row.num_actions, 1))
        return cross_entropy(scores.logprobs_A, pairs)
