"""What a step of supervised fine-tuning is under every backend: rows, loss, and the settings of AdamW.

Axes: `A` actions of a row: the tokens of its answers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from fovea.errors import TrainError
from fovea.models.drawn_distribution import check_drawable
from fovea.models.policy_network import PolicyNetwork
from fovea.models.shared_prefix.packed_row import PackedRow
from fovea.train.base import Pair
from fovea.train.deal import deal_in_turn, dummy_prompt
from fovea.train.packing import pack_row
from fovea.train.ranks import Ranks
from fovea.types import PromptImage

MAX_GRAD_NORM = 1.0
BETAS = (0.9, 0.95)
EPS = 1e-8
WEIGHT_DECAY = 0.01


def check_answers(pairs: Sequence[Pair], banned_ids: Sequence[int]) -> None:
    """TrainError on a banned target."""
    for pair in pairs:
        check_drawable(np.asarray(pair.answer_ids), banned_ids, "an answer of the warm-up")


def row_of_share(
    vlm: PolicyNetwork, pairs: Sequence[Pair], shares: Ranks, images_of_all: Sequence[PromptImage] = ()
) -> PackedRow:
    """The row of this share of the pairs; `images_of_all` where a share without images has to encode one."""
    mine = deal_in_turn(pairs, shares.size)[shares.rank]
    prompts = [pair.prompt for pair in mine]
    answers = [[np.asarray(pair.answer_ids, dtype=np.int64)] for pair in mine]
    if shares.size > 1:
        # a share without pairs makes the same passes as the others
        prompts, answers = [*prompts, dummy_prompt(images_of_all, vlm.family.image_token_id)], [*answers, []]
    return pack_row(vlm.family, prompts, answers, vlm.device)


def cross_entropy(logprobs_A: Tensor, pairs: Sequence[Pair]) -> Tensor:
    """A share's summand of the loss, which is a mean over the tokens of all answers."""
    return -logprobs_A.sum() / sum(len(pair.answer_ids) for pair in pairs)


def check_finite(loss: float, step: int) -> None:
    """TrainError for a loss that is none."""
    if not math.isfinite(loss):
        raise TrainError(f"the loss is {loss} at warm-up step {step + 1}; lower warmup.learning_rate")
