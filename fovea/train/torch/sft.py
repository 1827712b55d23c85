"""Supervised pairs: the warm-up of a model that starts from nothing, on the same packed passes as RL."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from fovea.config.run import Warmup
from fovea.errors import TrainError
from fovea.models.policy_network import PolicyNetwork
from fovea.models.trainable import trainable_parameters
from fovea.train.base import Pair
from fovea.train.packing import pack_row
from fovea.train.torch.optimizer import MasterWeights, learning_rate, make_adamw, set_learning_rate

MAX_GRAD_NORM = 1.0
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.01


class SupervisedTrainer:
    """Next-token cross-entropy on the answers, mean over their tokens."""

    def __init__(self, vlm: PolicyNetwork, settings: Warmup) -> None:
        self._vlm = vlm
        self._settings = settings
        parameters = trainable_parameters(vlm)
        self._parameters = list(parameters.values())
        self._masters = MasterWeights(parameters)
        self._optimizer = make_adamw(list(self._masters.by_name.values()), betas=BETAS, weight_decay=WEIGHT_DECAY)
        self._steps = 0

    def update(self, pairs: Sequence[Pair]) -> float:
        """One optimizer step; returns the loss."""
        settings = self._settings
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
        self._optimizer.zero_grad(set_to_none=True)
        loss = self._loss(pairs)
        if not bool(torch.isfinite(loss)):
            raise TrainError(
                f"the loss is {float(loss.detach())} at warm-up step {self._steps + 1}; lower warmup.learning_rate"
            )
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self._parameters, MAX_GRAD_NORM)
        self._masters.take_gradients()
        self._optimizer.step()
        self._masters.write_back()
        self._vlm.eval()
        self._steps += 1
        return float(loss.detach())

    def _loss(self, pairs: Sequence[Pair]) -> torch.Tensor:
        row = pack_row(
            self._vlm.family,
            [pair.prompt for pair in pairs],
            [[np.asarray(pair.answer_ids, dtype=np.int64)] for pair in pairs],
            self._parameters[0].device,
        )
        scores = self._vlm(row, temperature=1.0, chunk_tokens=row.num_actions)
        return -torch.as_tensor(scores.logprobs_A).mean()
