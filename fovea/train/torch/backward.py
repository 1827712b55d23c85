"""Gradient accumulation: forward and backward passes over the micro-batches of a minibatch.

Axes: `A` actions of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fovea.config.run import Algorithm
from fovea.models.shared_prefix.packed_row import PackedRow
from fovea.train.objective import policy_terms
from fovea.train.packing import MicroBatch
from fovea.train.torch.activation_reuse import Reuse
from fovea.train.torch.critic import Critic, ValueModel, value_terms
from fovea.train.torch.forward import Scorer
from fovea.train.torch.ranks import Ranks
from fovea.train.torch.sharding import sync_gradients
from fovea.train.update_metrics import ActivationMeter
from fovea.types import SampleGroup


@dataclass(slots=True)
class PassResult:
    """Log-probs, metrics and non-finite tasks from a forward and backward pass over a minibatch."""

    logprobs: list[tuple[MicroBatch, Tensor]] = field(default_factory=list)
    """Each micro-batch of this rank with its log-probs [A]."""
    sums: dict[str, float] = field(default_factory=dict)
    """Sums for the metrics (`train.update_metrics`)."""
    not_finite: list[str] = field(default_factory=list)
    """Ids of tasks with a non-finite log-prob, value or return."""
    in_bad_micro_batches: list[str] = field(default_factory=list)
    """Ids of all tasks in micro-batches with a non-finite loss."""

    def add(self, sums: dict[str, Tensor]) -> None:
        """Add the sums of one micro-batch."""
        for key, value in sums.items():
            self.sums[key] = self.sums.get(key, 0.0) + float(value)

    def agree(self, ranks: Ranks) -> None:
        """Combine sums and non-finite tasks over all ranks, so that every rank decides alike how to continue."""
        seen = ranks.gather([self.sums, self.not_finite, self.in_bad_micro_batches])
        self.sums, self.not_finite, self.in_bad_micro_batches = {}, [], []
        for sums, not_finite, in_bad_micro_batches in seen:
            for key, value in sums.items():
                self.sums[key] = self.sums.get(key, 0.0) + value
            self.not_finite += not_finite
            self.in_bad_micro_batches += in_bad_micro_batches

    @property
    def bad_tasks(self) -> list[str]:
        """Ids of tasks with a non-finite number; if none is known, of all in micro-batches with a non-finite loss."""
        return list(dict.fromkeys(self.not_finite or self.in_bad_micro_batches))

    def mark(self, micro: MicroBatch, *values_A: Tensor | None) -> None:
        """Record the tasks of a micro-batch with a non-finite loss, and which of them have non-finite inputs."""
        given = (*micro.given_logprobs, micro.values_A, micro.returns_A, *values_A)
        finite_A = torch.stack([value.detach().isfinite() for value in given if value is not None]).all(0)
        tasks = [group.task_id for group in micro.groups for _ in group.samples]
        bad = [not bool(part.all()) for part in finite_A.cpu().split(micro.lengths)]
        self.not_finite += dict.fromkeys(task for task, is_bad in zip(tasks, bad, strict=True) if is_bad)
        self.in_bad_micro_batches += dict.fromkeys(tasks)

    @property
    def policy_kl(self) -> float:
        """KL divergence from the policy before the update to the present one, per action."""
        return self.sums.get("kl/policy", 0.0) / max(self.sums.get("actions", 0.0), 1.0)


class Backward:
    """Forward and backward passes of a policy and of its critic, if there is one."""

    def __init__(self, scorer: Scorer, algorithm: Algorithm, critic: Critic | None, ranks: Ranks) -> None:
        self.activations = ActivationMeter(scorer.vlm)
        self._scorer = scorer
        self._algorithm = algorithm
        self._critic = critic
        self._ranks = ranks

    def __call__(self, groups: Sequence[SampleGroup], reuse: Reuse | None, scale: float) -> PassResult:
        """Accumulate the gradients of these groups over all ranks.

        `scale` is the number of groups in the batch over that in the minibatch: `Sample.weight` refers to the batch.
        """
        done = PassResult()
        micros = self._scorer.micro_batches(groups)
        for number, micro in enumerate(micros, start=1):
            # one reduce-scatter per optimizer step: the micro-batches before the last one add to local gradients
            is_last = number == len(micros)
            sync_gradients(self._scorer.vlm, now=is_last)
            self._policy(micro, micro.row if reuse is None else reuse.row(micro), done, scale)
            if self._critic is not None and self._critic.model is not None:
                # after the policy's backward pass, so that only one autograd graph is in memory at a time
                sync_gradients(self._critic.model, now=is_last)
                self._value_model(self._critic.model, micro, done, scale)
        if reuse is not None:
            reuse.finish()
            done.sums |= {"reused_actions": float(reuse.actions), "reused_images": float(len(reuse.graph))}
        done.agree(self._ranks)
        return done

    def _policy(self, micro: MicroBatch, row: PackedRow, done: PassResult, scale: float) -> None:
        with self.activations(row.num_tokens):
            scores = self._scorer(row)
            loss, sums = policy_terms(scores, micro, self._algorithm)
        done.logprobs.append((micro, scores.logprobs_A.detach()))
        if scores.values_A is not None:
            value_loss, value_sums = value_terms(scores.values_A, micro, self._algorithm)
            loss, sums = loss + value_loss, sums | value_sums
        # also where the loss is not finite: the other ranks' backward passes wait for this one's collectives
        (scale * loss).backward()
        # a non-finite log-prob of the engine means that it drew a token of probability 0: an error even where the loss
        # does not read it
        if not bool(torch.stack([loss, *(given_A.sum() for given_A in micro.given_logprobs)]).isfinite().all()):
            done.mark(micro, scores.logprobs_A, scores.values_A)
            return
        # a minibatch stands for the whole batch in its optimizer step
        weighed = {"loss": scale * loss.detach(), "policy_loss": scale * sums["policy_loss"]}
        done.add(sums | weighed | {"actions": torch.tensor(float(row.num_actions))})

    def _value_model(self, model: ValueModel, micro: MicroBatch, done: PassResult, scale: float) -> None:
        values_A = model(micro.row)
        loss, sums = value_terms(values_A, micro, self._algorithm)
        (scale * loss).backward()
        if not bool(torch.isfinite(loss)):
            done.mark(micro, values_A)
            return
        done.add(sums | {"loss": scale * loss.detach()})
