"""Supervised fine-tuning on prompts and answers: the warm-up of a randomly initialised model before RL."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fovea.config.run import Warmup
from fovea.models.policy_network import PolicyNetwork
from fovea.models.trainable import trainable_parameters
from fovea.train.adamw import make_adamw, set_learning_rate
from fovea.train.base import Pair
from fovea.train.lr_schedule import learning_rate
from fovea.train.ranks import ALONE, Ranks
from fovea.train.supervised import (
    BETAS,
    EPS,
    MAX_GRAD_NORM,
    WEIGHT_DECAY,
    check_answers,
    check_finite,
    cross_entropy,
    row_of_share,
)
from fovea.train.torch.dropout import dropout_seed
from fovea.train.torch.optimizer import MasterWeights
from fovea.train.torch.sharding import shards_tower


class SupervisedTrainer:
    """Trains by next-token cross-entropy on the answers, averaged over their tokens, with packed rows as in RL.

    The cross-entropy is that of the distribution which RL draws from and trains on, at temperature 1: banned ids are
    out of it here too, so that there is one meaning of log-prob, and nothing is spent on what cannot be drawn.
    """

    def __init__(
        self, vlm: PolicyNetwork, settings: Warmup, ranks: Ranks = ALONE, *, cpu_offload: bool = False
    ) -> None:
        """`cpu_offload` keeps master weights and moments in the host's memory, as `train.backend.cpu_offload` says."""
        self._vlm = vlm
        self._ranks = ranks
        self._settings = settings
        parameters = trainable_parameters(vlm)
        self._parameters = list(parameters.values())
        self._masters = MasterWeights(parameters, on_host=cpu_offload)
        self._optimizer = make_adamw(
            list(self._masters.by_name.values()), betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY
        )
        self._steps = 0

    def update(self, pairs: Sequence[Pair]) -> float:
        """Take one optimizer step on the pairs; returns their loss, over all ranks. TrainError on a banned target."""
        settings = self._settings
        check_answers(pairs, self._vlm.banned_ids)
        rate = learning_rate(
            self._steps,
            peak=settings.learning_rate,
            warmup_steps=settings.lr_warmup_steps,
            total_steps=settings.max_steps,
            shape="constant",
            final_frac=1.0,
        )
        set_learning_rate(self._optimizer, rate)
        self._vlm.train()
        with dropout_seed(self._steps, self._ranks, self._vlm.device):
            part = self._loss(pairs)
        # summed before the check, so that all ranks raise or none
        loss: float = sum(self._ranks.gather(float(part.detach())))
        check_finite(loss, self._steps)
        torch.autograd.backward(part)
        torch.nn.utils.clip_grad_norm_(self._parameters, MAX_GRAD_NORM)
        self._masters.take_gradients()
        self._optimizer.step()
        self._masters.write_back()
        self._optimizer.zero_grad(set_to_none=True)
        self._vlm.eval()
        self._steps += 1
        return loss

    def _loss(self, pairs: Sequence[Pair]) -> torch.Tensor:
        """This rank's summand of the loss."""
        # a rank without images must enter the same sharded modules as the others
        images = [image for pair in pairs for image in pair.prompt.images] if shards_tower(self._vlm) else []
        row = row_of_share(self._vlm, pairs, self._ranks, images)
        scores = self._vlm(row, temperature=1.0, chunk_tokens=max(row.num_actions, 1))
        return cross_entropy(scores.logprobs_A, pairs)
