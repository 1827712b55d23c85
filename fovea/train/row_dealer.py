"""Micro-batches of one rank, from the assignment of groups to all ranks, and their results in the order of the batch.

Axes: `A` actions of a micro-batch, `T` tokens of a completion.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fovea.config.sections import Train
from fovea.models.drawn_distribution import check_drawable
from fovea.models.flops import training_passes
from fovea.models.policy_network import PolicyNetwork
from fovea.models.trainable import lora_layers
from fovea.train.microbatch_memory import MicrobatchLimit
from fovea.train.microbatching import Cost, check_padding
from fovea.train.packing import MicroBatch, micro_batches
from fovea.train.ranks import Ranks
from fovea.train.row_assignment import Deal
from fovea.types import Metrics, SampleGroup
from fovea.utils.host_waits import awaited


class RowDealer:
    """Packs samples into micro-batches for one rank."""

    def __init__(
        self, vlm: PolicyNetwork, train: Train, ranks: Ranks, limit: MicrobatchLimit, *, shards_tower: bool
    ) -> None:
        """`vlm` tells the family, the banned ids, the device and what is trained; it is not run."""
        self.deal = Deal(
            train=train,
            cost=cost_of(vlm),
            num_ranks=ranks.size,
            image_token_id=vlm.family.image_token_id,
            shards_tower=shards_tower,
        )
        self._vlm = vlm
        self._train = train
        self._ranks = ranks
        self._limit = limit

    def micro_batches(self, groups: Sequence[SampleGroup], only: SampleGroup | None = None) -> list[MicroBatch]:
        """Micro-batches of this rank's share of the groups; all ranks have the same number of them.

        With `only`, they hold that one of the groups only, each part of it on the rank that has its pixels.
        TrainError where an action is a banned token, as it may be in samples that no engine of ours drew.
        """
        if not groups:
            return []
        for group in groups:
            for sample in group.samples:
                actions = sample.token_ids_T[sample.mask_T]
                check_drawable(actions, self._vlm.banned_ids, f"a sample of {group.task_id}")
        rows_of_ranks = self.deal.rows_of_ranks(
            groups, self._microbatch_tokens(groups), only, groups_per_row=self._limit.groups_per_row
        )
        padded_tokens = None if self._train.variable_seq_lengths else self._microbatch_tokens(groups)
        if padded_tokens is not None:
            # the rows of all ranks, so that all of them raise
            check_padding([row for rows in rows_of_ranks for row in rows], padded_tokens)
        mine, like = rows_of_ranks[self._ranks.rank], groups[0].samples[0]
        return micro_batches(self._vlm.family, mine, like, self._vlm.device, padded_tokens)

    def balance(self, minibatches: Sequence[Sequence[SampleGroup]]) -> Metrics:
        """Balance of the work (`Deal.balance`), mean over the minibatches."""
        found = [self.deal.balance(groups, self._microbatch_tokens(groups)) for groups in minibatches]
        return {key: float(np.mean([each[key] for each in found])) for key in found[0]}

    def _microbatch_tokens(self, groups: Sequence[SampleGroup]) -> int:
        return self.deal.tokens_for(groups, self._limit.max_tokens)


def cost_of(vlm: PolicyNetwork) -> Cost:
    """Cost model of a training pass of this model, with features of a frozen vision tower and projector cached."""
    # a projector that is trained behind a frozen tower needs forward passes of the tower only
    passes = training_passes(
        lora=bool(lora_layers(vlm)), trains_vision=vlm.trains_tower, features_cached=not vlm.trains_vision
    )
    return Cost(work=vlm.family.work, passes=passes)


def in_batch_order(
    scored: Iterable[tuple[MicroBatch, Tensor]], groups: Sequence[SampleGroup], ranks: Ranks
) -> list[NDArray[np.float32]]:
    """Scatter per-action values [A] of micro-batches into one array [T] per sample, in the order of the batch.

    Includes the micro-batches of all ranks. Tokens that are not actions have 0.
    """
    samples = [sample for group in groups for sample in group.samples]
    lengths = [len(sample.token_ids_T) for sample in samples]
    ends = list(accumulate(lengths))
    values = np.zeros(sum(lengths), dtype=np.float32)
    found = list(scored)
    numbers = [number for micro, _ in found for number in micro.sample_numbers]
    # all of them in one copy: the host waits for a GPU at each
    joined = awaited(torch.cat([values_A for _, values_A in found])).cpu() if found else torch.zeros(0)
    parts = joined.split([length for micro, _ in found for length in micro.lengths])
    for number, part in zip(numbers, parts, strict=True):
        values[ends[number] - lengths[number] : ends[number]][samples[number].mask_T] = part.numpy()
    # one array for the whole batch, so that one all-reduce is enough
    values = ranks.merge_disjoint(values)
    return [values[end - length : end] for end, length in zip(ends, lengths, strict=True)]
