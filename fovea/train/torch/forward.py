"""Forward passes of the trainer: samples in, packed rows through the network, scores out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from fovea.config.sections import Train
from fovea.models.head_gradients import LossGradients
from fovea.models.policy_network import PolicyNetwork
from fovea.models.shared_prefix.layout import PackedRow
from fovea.models.token_logprobs import TokenScores
from fovea.train.microbatches import MicroBatcher, MicrobatchLimit
from fovea.train.packing import MicroBatch
from fovea.train.ranks import Ranks
from fovea.train.torch.sharding import shards_tower
from fovea.types import Batch


@contextmanager
def dropout_seed(step: int, ranks: Ranks, device: torch.device) -> Iterator[None]:
    """Seed torch's generators in this context by step and rank, and put them back behind it.

    Only by the counters, so that a resumed run drops what an uninterrupted one does; by rank, so that each draws
    different masks for its rows.
    """
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(int(np.random.SeedSequence((step, ranks.rank)).generate_state(1)[0]))
        yield


class Scorer:
    """Packs samples into micro-batches for one rank, and passes them forward through the network."""

    def __init__(
        self, vlm: PolicyNetwork, train: Train, temperature: float, ranks: Ranks, limit: MicrobatchLimit
    ) -> None:
        self.vlm = vlm
        self.batcher = MicroBatcher(vlm, train, ranks, limit, shards_tower=shards_tower(vlm))
        self.temperature = temperature
        # the largest tensor of a pass is that of the logits: it is made for so many actions at a time
        self._chunk_tokens = max(1, int(train.backend.logits_mib * 2**20 / vlm.logits_bytes_per_token))

    def __call__(self, row: PackedRow, loss_gradients: LossGradients | None = None) -> TokenScores:
        """Scores of the row's actions; `loss_gradients` are those of a backward pass that follows."""
        scores: TokenScores = self.vlm(
            row, temperature=self.temperature, chunk_tokens=self._chunk_tokens, loss_gradients=loss_gradients
        )
        return scores

    @torch.no_grad()
    def score(self, batch: Batch) -> list[tuple[MicroBatch, TokenScores]]:
        """Scores of this rank's micro-batches under the current weights."""
        return [(micro, self(micro.row)) for micro in self.batcher.micro_batches(batch.groups)]
