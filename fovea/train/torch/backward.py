"""Gradient accumulation: forward and backward passes over the micro-batches of a minibatch.

Axes: `A` actions of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from fovea.config.run import Algorithm
from fovea.models.recompute import kept_bytes
from fovea.models.shared_prefix.packed_row import PackedRow
from fovea.train.objective import value_terms
from fovea.train.packing import MicroBatch
from fovea.train.pass_result import PassResult, measured_loss
from fovea.train.ranks import Ranks
from fovea.train.slopes import known_slopes
from fovea.train.torch.activation_reuse import Reuse
from fovea.train.torch.critic import Critic, ValueModel
from fovea.train.torch.forward import Scorer
from fovea.train.torch.sharding import sum_over_replicas
from fovea.train.update_metrics import ActivationMeter
from fovea.types import SampleGroup


class Backward:
    """Forward and backward passes of a policy and of its critic, if there is one."""

    def __init__(self, scorer: Scorer, algorithm: Algorithm, critic: Critic | None, ranks: Ranks) -> None:
        self.activations = ActivationMeter(scorer.vlm, partial(kept_bytes, scorer.vlm.network))
        self._scorer = scorer
        self._algorithm = algorithm
        self._critic = critic
        self._ranks = ranks

    def __call__(
        self, groups: Sequence[SampleGroup], reuse: Reuse | None, scale: float, only: SampleGroup | None = None
    ) -> PassResult:
        """Accumulate the gradients of these groups, or of `only` one of them, over all ranks.

        `scale` is the number of groups in the batch over that in the minibatch: `Sample.weight` refers to the batch.
        """
        done = PassResult()
        micros = self._scorer.micro_batches(groups, only)
        for number, micro in enumerate(micros, start=1):
            is_last = number == len(micros)
            sum_over_replicas(self._scorer.vlm, now=is_last)
            self._policy(micro, micro.row if reuse is None else reuse.row(micro), done, scale)
            if self._critic is not None and self._critic.model is not None:
                # after the policy's backward pass, so that only one autograd graph is in memory at a time
                sum_over_replicas(self._critic.model, now=is_last)
                self._value_model(self._critic.model, micro, done, scale)
        if reuse is not None:
            reuse.finish()
            done.add({"reused_actions": float(reuse.actions), "reused_images": float(len(reuse.graph))})
        done.read()
        done.agree(self._ranks)
        return done

    def _policy(self, micro: MicroBatch, row: PackedRow, done: PassResult, scale: float) -> None:
        with self.activations(row.num_tokens):
            scores = self._scorer(row, known_slopes(micro, self._algorithm, scale))
            loss = measured_loss(scores, micro, self._algorithm, scale, done)
        # also where the loss is not finite: the other ranks' backward passes wait for this one's collectives
        loss.backward()

    def _value_model(self, model: ValueModel, micro: MicroBatch, done: PassResult, scale: float) -> None:
        values_A = model(micro.row)
        loss, sums = value_terms(values_A, micro, self._algorithm)
        (scale * loss).backward()
        done.measure(micro, torch.isfinite(loss), sums | {"loss": scale * loss.detach()}, values_A)
