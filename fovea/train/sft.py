"""Supervised fine-tuning on prompts and answers: the warm-up of a model before RL.

Axes: `A` actions of a row, which are the tokens of its answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from fovea.errors import TrainError
from fovea.models.policy_network import PolicyNetwork
from fovea.models.sampling_distribution import check_can_be_sampled
from fovea.models.shared_prefix.layout import PackedRow
from fovea.train.base import PolicyOptimizer, SftExample
from fovea.train.packing import pack_row
from fovea.train.ranks import Ranks
from fovea.train.row_assignment import dummy_prompt, round_robin
from fovea.types import PromptImage


class SupervisedTrainer:
    """Trains by next-token cross-entropy on the answers, averaged over their tokens, with packed rows as in RL.

    The cross-entropy is that of the distribution that RL samples from and trains, at temperature 1. Banned ids are
    excluded here too: a log-prob then means the same everywhere, and no training goes into tokens that cannot be
    sampled.
    """

    def __init__(
        self,
        optimizer: PolicyOptimizer,
        backward: Callable[[Sequence[SftExample], int], float],
        *,
        ranks: Ranks,
        banned_ids: Sequence[int],
    ) -> None:
        """`backward` computes the gradients of step 0, 1, ... and returns this process's part of the loss."""
        self.optimizer = optimizer
        self._backward = backward
        self._ranks = ranks
        self._banned_ids = banned_ids
        self._steps = 0

    def update(self, pairs: Sequence[SftExample]) -> float:
        """Take one optimizer step on the pairs; returns their loss, over all ranks. TrainError on a banned target."""
        for pair in pairs:
            check_can_be_sampled(np.asarray(pair.answer_ids), self._banned_ids, "an answer of the warm-up")
        self.optimizer.zero_grad()
        # the sum is the same on all ranks, so that either all of them raise or none
        loss: float = sum(self._ranks.gather(self._backward(pairs, self._steps)))
        if not math.isfinite(loss):
            raise TrainError(f"the loss is {loss} at warm-up step {self._steps + 1}; lower warmup.learning_rate")
        self.optimizer.set_rate(self._steps)
        self.optimizer.clip()
        self.optimizer.step()
        # free their memory for what comes between two steps: an evaluation on dev rows, or the first rollout
        self.optimizer.zero_grad()
        self._steps += 1
        return loss


def row_of_share(
    vlm: PolicyNetwork, pairs: Sequence[SftExample], shares: Ranks, images_of_all: Sequence[PromptImage] = ()
) -> PackedRow:
    """The packed row of this share of the pairs; `images_of_all` if a share without images must encode one too."""
    mine = round_robin(pairs, shares.size)[shares.rank]
    prompts = [pair.prompt for pair in mine]
    answers = [[np.asarray(pair.answer_ids, dtype=np.int64)] for pair in mine]
    if shares.size > 1:
        # a share without pairs must make the same passes as the others
        prompts, answers = [*prompts, dummy_prompt(images_of_all, vlm.family.image_token_id)], [*answers, []]
    return pack_row(vlm.family, prompts, answers, vlm.device)


def cross_entropy(logprobs_A: Tensor, pairs: Sequence[SftExample]) -> Tensor:
    """A share's part of the loss, which is the mean over the tokens of all answers."""
    return -logprobs_A.sum() / sum(len(pair.answer_ids) for pair in pairs)
