"""A model with the way its rows are cut: samples in, log-probs out.

Axes: `A` actions of a micro-batch, `T` tokens of a completion.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fovea.config.run import Train
from fovea.models.flops import training_passes
from fovea.models.policy_network import PolicyNetwork
from fovea.models.shared_prefix.packed_row import PackedRow
from fovea.models.token_logprobs import TokenScores
from fovea.models.trainable import lora_layers
from fovea.train.microbatching import Cost, cut_by_cost, cut_by_count
from fovea.train.packing import MicroBatch, micro_batches
from fovea.types import Batch, SampleGroup


class Scorer:
    """The forward pass of training."""

    def __init__(self, vlm: PolicyNetwork, train: Train, temperature: float) -> None:
        self.vlm = vlm
        self.cost = _cost_of(vlm)
        self._train = train
        self._temperature = temperature
        self._device = next(vlm.parameters()).device
        self._chunk_tokens = max(1, int(train.backend.logits_mib * 2**20 / vlm.logits_bytes_per_token))

    def __call__(self, row: PackedRow) -> TokenScores:
        scores: TokenScores = self.vlm(row, temperature=self._temperature, chunk_tokens=self._chunk_tokens)
        return scores

    def micro_batches(self, groups: Sequence[SampleGroup]) -> list[MicroBatch]:
        """The groups in packed rows; how they are cut changes no gradient."""
        train = self._train
        max_tokens = train.max_tokens_per_microbatch
        fixed_tokens = None if train.variable_seq_lengths else max_tokens
        if train.enable_dynamic_batch_size:
            rows = cut_by_cost(groups, self.cost, max_tokens)
        else:
            rows = cut_by_count(groups, train.groups_per_microbatch, fixed_tokens)
        return micro_batches(self.vlm.family, rows, self._device, fixed_tokens)

    @torch.no_grad()
    def logprobs(self, batch: Batch) -> list[NDArray[np.float32]]:
        """Log-probs [T] of every sample under the current weights."""
        return in_batch_order((micro, self(micro.row).logprobs_A) for micro in self.micro_batches(batch.groups))


def _cost_of(vlm: PolicyNetwork) -> Cost:
    """A training pass of this model. The features of a frozen vision tower are taken to be cached."""
    passes = training_passes(lora=bool(lora_layers(vlm)), trains_vision=vlm.trains_vision, features_cached=True)
    return Cost(work=vlm.family.work, passes=passes)


def in_batch_order(scored: Iterable[tuple[MicroBatch, Tensor]]) -> list[NDArray[np.float32]]:
    """Per-action values [A] of micro-batches as one array [T] per sample, 0 where the mask is False, in batch order."""
    values: dict[int, NDArray[np.float32]] = {}
    for micro, values_A in scored:
        samples = (sample for group in micro.groups for sample in group.samples)
        parts = values_A.cpu().split(micro.lengths)
        for number, sample, part in zip(micro.sample_numbers, samples, parts, strict=True):
            values[number] = _spread(part.numpy(), sample.mask_T)
    return [values[number] for number in range(len(values))]


def _spread(values_a: NDArray[np.float32], mask_T: NDArray[np.bool_]) -> NDArray[np.float32]:
    """One value per action as one per token."""
    if len(values_a) == len(mask_T):
        return values_a
    spread_T = np.zeros(len(mask_T), dtype=np.float32)
    spread_T[mask_T] = values_a
    return spread_T
