"""Supervised fine-tuning on prompts and answers: the warm-up of a randomly initialised model before RL."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from fovea.config.run import Warmup
from fovea.errors import TrainError
from fovea.models.drawn_distribution import check_drawable
from fovea.models.policy_network import PolicyNetwork
from fovea.models.trainable import trainable_parameters
from fovea.train.base import Pair
from fovea.train.deal import deal_in_turn, dummy_prompt
from fovea.train.lr_schedule import learning_rate
from fovea.train.packing import pack_row
from fovea.train.ranks import ALONE, Ranks
from fovea.train.torch.dropout import dropout_seed
from fovea.train.torch.optimizer import MasterWeights, make_adamw, set_learning_rate
from fovea.train.torch.sharding import shards_tower

MAX_GRAD_NORM = 1.0
BETAS = (0.9, 0.95)
EPS = 1e-8
WEIGHT_DECAY = 0.01


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
        for pair in pairs:
            check_drawable(np.asarray(pair.answer_ids), self._vlm.banned_ids, "an answer of the warm-up")
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
        if not math.isfinite(loss):
            raise TrainError(f"the loss is {loss} at warm-up step {self._steps + 1}; lower warmup.learning_rate")
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
        mine = deal_in_turn(pairs, self._ranks.size)[self._ranks.rank]
        prompts = [pair.prompt for pair in mine]
        answers = [[np.asarray(pair.answer_ids, dtype=np.int64)] for pair in mine]
        if self._ranks.size > 1:
            # a rank without pairs, or without images, must enter the same sharded modules as the others
            images = [image for pair in pairs for image in pair.prompt.images] if shards_tower(self._vlm) else []
            prompts, answers = [*prompts, dummy_prompt(images, self._vlm.family.image_token_id)], [*answers, []]
        row = pack_row(self._vlm.family, prompts, answers, self._vlm.device)
        scores = self._vlm(row, temperature=1.0, chunk_tokens=max(row.num_actions, 1))
        return -torch.as_tensor(scores.logprobs_A).sum() / sum(len(pair.answer_ids) for pair in pairs)
