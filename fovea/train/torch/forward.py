"""Forward passes of the trainer: samples in, packed rows through the network, per-sample arrays out.

Axes: `A` actions of a micro-batch, `T` tokens of a completion.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fovea.config.run import Train
from fovea.models.drawn_distribution import check_drawable
from fovea.models.flops import training_passes
from fovea.models.policy_network import PolicyNetwork
from fovea.models.shared_prefix.packed_row import PackedRow
from fovea.models.token_logprobs import TokenScores
from fovea.models.trainable import lora_layers
from fovea.train.microbatching import (
    Cost,
    GroupSlice,
    RowSlices,
    align_ranks,
    assign_to_ranks,
    check_padding,
    pack_by_cost,
    pack_by_count,
    slice_groups,
)
from fovea.train.packing import MicroBatch, micro_batches
from fovea.train.torch.ranks import Ranks
from fovea.train.torch.sharding import shards_tower
from fovea.types import Batch, Prompt, PromptImage, SampleGroup


class Scorer:
    """Packs samples into micro-batches for one rank, and runs the network on them."""

    def __init__(self, vlm: PolicyNetwork, train: Train, temperature: float, ranks: Ranks) -> None:
        self.vlm = vlm
        self.cost = _cost_of(vlm)
        self._train = train
        self._temperature = temperature
        self._ranks = ranks
        self._device = next(vlm.parameters()).device
        # the largest tensor of a pass is that of the logits: it is made for so many actions at a time
        self._chunk_tokens = max(1, int(train.backend.logits_mib * 2**20 / vlm.logits_bytes_per_token))

    def __call__(self, row: PackedRow) -> TokenScores:
        scores: TokenScores = self.vlm(row, temperature=self._temperature, chunk_tokens=self._chunk_tokens)
        return scores

    def micro_batches(self, groups: Sequence[SampleGroup]) -> list[MicroBatch]:
        """Micro-batches of this rank's share of the groups; all ranks have the same number of them.

        TrainError where an action is a banned token, as it may be in samples that no engine of ours drew.
        """
        if not groups:
            return []
        for group in groups:
            for sample in group.samples:
                actions = sample.token_ids_T[sample.mask_T]
                check_drawable(actions, self.vlm.banned_ids, f"a sample of {group.task_id}")
        train = self._train
        slices = slice_groups(groups, train.max_tokens_per_microbatch if train.enable_dynamic_batch_size else None)
        shares = assign_to_ranks(slices, self.cost, self._ranks.size)
        rows_of_ranks = align_ranks([self._pack_rows(share) for share in shares], self._dummy(groups))
        padded_tokens = None if train.variable_seq_lengths else train.max_tokens_per_microbatch
        if padded_tokens is not None:
            # the rows of all ranks, so that all of them raise
            check_padding([row for rows in rows_of_ranks for row in rows], padded_tokens)
        mine, like = rows_of_ranks[self._ranks.rank], groups[0].samples[0]
        return micro_batches(self.vlm.family, mine, like, self._device, padded_tokens)

    def _pack_rows(self, share: Sequence[GroupSlice]) -> list[RowSlices]:
        if self._train.enable_dynamic_batch_size:
            return pack_by_cost(share, self.cost, self._train.max_tokens_per_microbatch)
        return pack_by_count(share, self._train.groups_per_microbatch)

    def _dummy(self, groups: Sequence[SampleGroup]) -> GroupSlice:
        """A slice without samples, with an image if the weights of the vision tower are sharded."""
        images = [image for group in groups for image in group.images] if shards_tower(self.vlm) else []
        return GroupSlice(group=SampleGroup(prompt=dummy_prompt(self.vlm, images), samples=()), first_sample=0)

    @torch.no_grad()
    def logprobs(self, batch: Batch) -> list[NDArray[np.float32]]:
        """Log-probs [T] of every sample of the batch, on all ranks, under the current weights."""
        scored = ((micro, self(micro.row).logprobs_A) for micro in self.micro_batches(batch.groups))
        return in_batch_order(scored, batch.groups, self._ranks)


def dummy_prompt(vlm: PolicyNetwork, images: Sequence[PromptImage]) -> Prompt:
    """Prompt of one text token and the smallest of these images, if there are any."""
    # an image of the batch and no made-up one: the tensors of an image differ by family
    chosen = sorted(images, key=lambda image: image.num_tokens)[:1]
    ids = np.array([0] + [vlm.family.image_token_id] * sum(image.num_tokens for image in chosen))
    return Prompt(token_ids_L=ids, unexpanded_ids_U=ids, images=tuple(chosen))


def _cost_of(vlm: PolicyNetwork) -> Cost:
    """Cost model of a training pass of this model. Features of a frozen vision tower are assumed to be cached."""
    passes = training_passes(lora=bool(lora_layers(vlm)), trains_vision=vlm.trains_vision, features_cached=True)
    return Cost(work=vlm.family.work, passes=passes)


def in_batch_order(
    scored: Iterable[tuple[MicroBatch, Tensor]], groups: Sequence[SampleGroup], ranks: Ranks
) -> list[NDArray[np.float32]]:
    """Scatter per-action values [A] of micro-batches into one array [T] per sample, in the order of the batch.

    Includes the micro-batches of all ranks. Tokens that are no actions have 0.
    """
    samples = [sample for group in groups for sample in group.samples]
    lengths = [len(sample.token_ids_T) for sample in samples]
    ends = list(accumulate(lengths))
    values = np.zeros(sum(lengths), dtype=np.float32)
    for micro, values_A in scored:
        for number, part in zip(micro.sample_numbers, values_A.cpu().split(micro.lengths), strict=True):
            values[ends[number] - lengths[number] : ends[number]][samples[number].mask_T] = part.numpy()
    # one array for the whole batch, so that one all-reduce is enough
    values = ranks.merge_disjoint(values)
    return [values[end - length : end] for end, length in zip(ends, lengths, strict=True)]
