"""Forward passes of the trainer: samples in, packed rows through the network, per-sample arrays out.

Axes: `T` tokens of a completion.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fovea.config.sections import Train
from fovea.models.head_gradients import Slopes
from fovea.models.policy_network import PolicyNetwork
from fovea.models.shared_prefix.layout import PackedRow
from fovea.models.token_logprobs import TokenScores
from fovea.models.trainable import adapters_off, lora_layers
from fovea.samples import has_old_logprobs, with_old_logprobs, with_reference_logprobs, with_values
from fovea.train.base import Needs
from fovea.train.microbatch_memory import MicrobatchLimit
from fovea.train.packing import MicroBatch
from fovea.train.ranks import Ranks
from fovea.train.row_assignment import Deal
from fovea.train.row_dealer import RowDealer, in_batch_order
from fovea.train.torch.critic import Critic
from fovea.train.torch.sharding import shards_tower
from fovea.types import Batch, Metrics, SampleGroup


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotator:
    """Passes of policy, reference and critic over a batch, for the figures that the loss compares with."""

    policy: Scorer
    reference: Scorer | None
    """A frozen copy of the policy from before RL; None without a KL term, and with adapters, which are switched off."""
    critic: Critic | None
    ranks: Ranks

    def annotate(self, batch: Batch, needs: Needs) -> Batch:
        """Add old and reference log-probs and values; a value head on the policy's trunk gives both in one pass."""
        shared_trunk = self.critic is not None and self.critic.model is None
        if needs.values and shared_trunk:
            logprobs, values = self.logprobs_and_values(batch)
            batch = with_values(batch, values)
            # the engine's, where they are the old ones, are there already
            batch = batch if has_old_logprobs(batch) else with_old_logprobs(batch, logprobs)
        elif needs.old_logprobs:
            batch = with_old_logprobs(batch, self.logprobs(batch))
        if needs.values and not shared_trunk:
            batch = with_values(batch, self.values(batch))
        if needs.reference_logprobs:
            batch = with_reference_logprobs(batch, self.reference_logprobs(batch))
        return batch

    def logprobs(self, batch: Batch) -> list[NDArray[np.float32]]:
        """Log-probs [T] of every sample under the current weights."""
        return self.policy.logprobs(batch)

    def reference_logprobs(self, batch: Batch) -> list[NDArray[np.float32]]:
        """Log-probs [T] of every sample under the reference: the weights from before RL."""
        if self.reference is not None:
            return self.reference.logprobs(batch)
        vlm = self.policy.vlm
        assert lora_layers(vlm), "no reference model was kept, and there are no adapters to switch off"
        with adapters_off(vlm):
            return self.policy.logprobs(batch)

    @torch.no_grad()
    def logprobs_and_values(self, batch: Batch) -> tuple[list[NDArray[np.float32]], list[NDArray[np.float32]]]:
        """Log-probs and values, [T] each, of every sample, from one pass of a policy with a value head."""
        logprobs: list[tuple[MicroBatch, Tensor]] = []
        values: list[tuple[MicroBatch, Tensor]] = []
        for micro in self.policy.micro_batches(batch.groups):
            scores = self.policy(micro.row)
            assert scores.values_A is not None, "values were requested, but the policy has no value head"
            logprobs.append((micro, scores.logprobs_A))
            values.append((micro, scores.values_A))
        return self._in_batch_order(logprobs, batch), self._in_batch_order(values, batch)

    @torch.no_grad()
    def values(self, batch: Batch) -> list[NDArray[np.float32]]:
        """Values [T] of every sample, from a pass of a separate value model."""
        assert self.critic is not None, "values were requested, but there is no value function"
        model = self.critic.model
        assert model is not None, "the value head is on the policy's trunk; call logprobs_and_values"
        scored = [(micro, model(micro.row)) for micro in self.policy.micro_batches(batch.groups)]
        return self._in_batch_order(scored, batch)

    def _in_batch_order(self, scored: Iterable[tuple[MicroBatch, Tensor]], batch: Batch) -> list[NDArray[np.float32]]:
        return in_batch_order(scored, batch.groups, self.ranks)
