"""Log-probs and values of the samples of a batch, computed before the update and without gradients.

Axes: `T` tokens of a completion.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fovea.models.trainable import adapters_off, lora_layers
from fovea.samples import has_old_logprobs, with_old_logprobs, with_reference_logprobs, with_values
from fovea.train.base import Needs
from fovea.train.packing import MicroBatch
from fovea.train.ranks import Ranks
from fovea.train.row_dealer import in_batch_order
from fovea.train.torch.critic import Critic
from fovea.train.torch.forward import Scorer
from fovea.types import Batch


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
