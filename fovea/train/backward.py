"""The gradient of a minibatch: its micro-batches forward and backward, one after the other.

Axes: `A` actions of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fovea.config import Algorithm
from fovea.models.row import PackedRow
from fovea.models.value_model import ValueModel
from fovea.packing import MicroBatch
from fovea.train.activations import ActivationMeter
from fovea.train.critic import Critic, value_terms
from fovea.train.objective import policy_terms
from fovea.train.reuse import Reuse
from fovea.train.scorer import Scorer
from fovea.types import SampleGroup


@dataclass(slots=True)
class Pass:
    """What a forward and backward pass over a minibatch leaves besides gradients."""

    logprobs: list[tuple[MicroBatch, Tensor]] = field(default_factory=list)
    """[A] of each micro-batch."""
    sums: dict[str, float] = field(default_factory=dict)
    """For the metrics (`train.tally`)."""
    not_finite: list[str] = field(default_factory=list)
    """Tasks with a log-prob, a value or a loss that is not finite; they have no gradient."""

    def add(self, sums: dict[str, Tensor]) -> None:
        for key, value in sums.items():
            self.sums[key] = self.sums.get(key, 0.0) + float(value)

    @property
    def policy_kl(self) -> float:
        """From the policy before the update to the one that was passed through, per action."""
        return self.sums.get("kl/policy", 0.0) / max(self.sums.get("actions", 0.0), 1.0)


class Backward:
    """For one policy, and the value function that is trained beside it."""

    def __init__(self, scorer: Scorer, algorithm: Algorithm, critic: Critic | None) -> None:
        self.activations = ActivationMeter(scorer.vlm)
        self._scorer = scorer
        self._algorithm = algorithm
        self._critic = critic

    def __call__(self, groups: Sequence[SampleGroup], reuse: Reuse | None, scale: float) -> Pass:
        """Add the gradients of these groups; `scale`: what the minibatch stands for in the whole batch."""
        done = Pass()
        for micro in self._scorer.micro_batches(groups):
            self._policy(micro, micro.row if reuse is None else reuse.row(micro), done, scale)
            if self._critic is not None and self._critic.model is not None:
                # after the policy's backward pass, so that one graph is in memory at a time
                self._value_model(self._critic.model, micro, done, scale)
        if reuse is not None:
            reuse.finish()
            done.sums |= {"reused_actions": float(reuse.actions), "reused_images": float(len(reuse.graph))}
        return done

    def _policy(self, micro: MicroBatch, row: PackedRow, done: Pass, scale: float) -> None:
        with self.activations(row.num_tokens):
            scores = self._scorer(row)
            loss, sums = policy_terms(scores, micro, self._algorithm)
        done.logprobs.append((micro, scores.logprobs_A.detach()))
        if scores.values_A is not None:
            value_loss, value_sums = value_terms(scores.values_A, micro, self._algorithm)
            loss, sums = loss + value_loss, sums | value_sums
        if not bool(torch.isfinite(loss)):
            done.not_finite += _tasks_that_are_not_finite(micro, scores.logprobs_A, scores.values_A)
            return
        (scale * loss).backward()
        weighed = {"loss": scale * loss.detach(), "policy_loss": scale * sums["policy_loss"]}
        done.add(sums | weighed | {"actions": torch.tensor(float(row.num_actions))})

    def _value_model(self, model: ValueModel, micro: MicroBatch, done: Pass, scale: float) -> None:
        values_A = model(micro.row)
        loss, sums = value_terms(values_A, micro, self._algorithm)
        if not bool(torch.isfinite(loss)):
            done.not_finite += _tasks_that_are_not_finite(micro, values_A)
            return
        (scale * loss).backward()
        done.add(sums | {"loss": scale * loss.detach()})


def _tasks_that_are_not_finite(micro: MicroBatch, *values: Tensor | None) -> list[str]:
    """Of a micro-batch whose loss is not finite; all of its tasks where no single value shows which."""
    given = [micro.rollout_logprobs_A, *(value.detach() for value in values if value is not None)]
    finite_A = torch.stack([value.isfinite() for value in given]).all(0)
    of_samples = [bool(part.all()) for part in finite_A.cpu().split(micro.lengths)]
    samples = [group.task_id for group in micro.groups for _ in group.samples]
    named = [task for task, finite in zip(samples, of_samples, strict=True) if not finite]
    return list(dict.fromkeys(named or samples))
