"""Forward passes of the trainer: samples in, packed rows through the network, per-sample arrays out.

Axes: `T` tokens of a completion.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from fovea.config.run import Train
from fovea.models.head_gradients import Slopes
from fovea.models.policy_network import PolicyNetwork
from fovea.models.shared_prefix.packed_row import PackedRow
from fovea.models.token_logprobs import TokenScores
from fovea.train.deal import Deal
from fovea.train.microbatch_memory import MicrobatchLimit
from fovea.train.packing import MicroBatch
from fovea.train.ranks import Ranks
from fovea.train.row_dealer import RowDealer, in_batch_order
from fovea.train.torch.sharding import shards_tower
from fovea.types import Batch, Metrics, SampleGroup


class Scorer:
    """Packs samples into micro-batches for one rank, and runs the network on them."""

    def __init__(
        self, vlm: PolicyNetwork, train: Train, temperature: float, ranks: Ranks, limit: MicrobatchLimit
    ) -> None:
        self.vlm = vlm
        self._dealer = RowDealer(vlm, train, ranks, limit, shards_tower=shards_tower(vlm))
        self.temperature = temperature
        self._ranks = ranks
        # the largest tensor of a pass is that of the logits: it is made for so many actions at a time
        self._chunk_tokens = max(1, int(train.backend.logits_mib * 2**20 / vlm.logits_bytes_per_token))

    def __call__(self, row: PackedRow, slopes: Slopes | None = None) -> TokenScores:
        """Scores of the row's actions; `slopes` of the loss of a backward pass, where they are known before it."""
        scores: TokenScores = self.vlm(
            row, temperature=self.temperature, chunk_tokens=self._chunk_tokens, slopes=slopes
        )
        return scores

    def micro_batches(self, groups: Sequence[SampleGroup], only: SampleGroup | None = None) -> list[MicroBatch]:
        """Micro-batches of this rank's share of the groups, as `RowDealer.micro_batches` makes them."""
        return self._dealer.micro_batches(groups, only)

    def balance(self, minibatches: Sequence[Sequence[SampleGroup]]) -> Metrics:
        """Balance of the work among ranks and micro-batches, as `RowDealer.balance` finds it."""
        return self._dealer.balance(minibatches)

    @property
    def deal(self) -> Deal:
        """How passes of the network are dealt to the ranks."""
        return self._dealer.deal

    @torch.no_grad()
    def logprobs(self, batch: Batch) -> list[NDArray[np.float32]]:
        """Log-probs [T] of every sample of the batch, on all ranks, under the current weights."""
        scored = ((micro, self(micro.row).logprobs_A) for micro in self.micro_batches(batch.groups))
        return in_batch_order(scored, batch.groups, self._ranks)
