"""Results of passes over micro-batches: loss, log-probs, metrics and tasks with non-finite values.

Axes: `A` actions of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fovea.config.algorithm import Algorithm
from fovea.models.head_gradients import LossGradients
from fovea.models.token_logprobs import TokenScores
from fovea.train.objective import policy_terms, precomputed_loss_gradients, value_terms
from fovea.train.packing import MicroBatch
from fovea.train.ranks import Ranks
from fovea.utils.host_waits import awaited


@dataclass(frozen=True, slots=True)
class _Measured:
    """Measurements of a micro-batch, still on its device."""

    micro: MicroBatch
    finite: Tensor
    """True if its loss is a finite number, []."""
    sums: dict[str, Tensor]
    """Sums for the metrics, [] each."""
    values_A: tuple[Tensor | None, ...]
    """Results of the network for its actions."""


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
    _measured: list[_Measured] = field(default_factory=list)

    def measure(self, micro: MicroBatch, finite: Tensor, sums: Mapping[str, Tensor], *values_A: Tensor | None) -> None:
        """Keep what a micro-batch has measured until `read`; its sums count if its loss is `finite`."""
        # detached, so that no graph stays in memory
        detached = {key: value.detach() for key, value in sums.items()}
        results = tuple(None if value_A is None else value_A.detach() for value_A in values_A)
        self._measured.append(_Measured(micro, finite, detached, results))

    def read(self) -> None:
        """Copy what all micro-batches have measured to the host, all at once: the host waits for a GPU at each copy."""
        on_device = [number.double() for each in self._measured for number in (each.finite, *each.sums.values())]
        numbers = iter(awaited(torch.stack(on_device)).tolist() if on_device else ())
        for each in self._measured:
            finite = bool(next(numbers))
            sums = {key: next(numbers) for key in each.sums}
            if finite:
                self.add(sums)
            else:
                self._mark(each.micro, *each.values_A)
        self._measured = []

    def add(self, sums: Mapping[str, float]) -> None:
        """Add sums to those of the pass."""
        for key, value in sums.items():
            self.sums[key] = self.sums.get(key, 0.0) + value

    def agree(self, ranks: Ranks) -> None:
        """Combine sums and non-finite tasks over all ranks, so that every rank decides alike how to continue."""
        seen = ranks.gather([self.sums, self.not_finite, self.in_bad_micro_batches])
        self.sums, self.not_finite, self.in_bad_micro_batches = {}, [], []
        for sums, not_finite, in_bad_micro_batches in seen:
            self.add(sums)
            self.not_finite += not_finite
            self.in_bad_micro_batches += in_bad_micro_batches

    @property
    def bad_tasks(self) -> list[str]:
        """Ids of tasks with a non-finite number; if none is known, of all in micro-batches with a non-finite loss."""
        return list(dict.fromkeys(self.not_finite or self.in_bad_micro_batches))

    def _mark(self, micro: MicroBatch, *values_A: Tensor | None) -> None:
        """Record the tasks of a micro-batch with a non-finite loss, and which of them have non-finite inputs."""
        given = (*micro.given_logprobs, micro.values_A, micro.returns_A, *values_A)
        finite_A = torch.stack([value.isfinite() for value in given if value is not None]).all(0)
        tasks = [group.task_id for group in micro.groups for _ in group.samples]
        bad = [not bool(part.all()) for part in awaited(finite_A).cpu().split(micro.lengths)]
        self.not_finite += dict.fromkeys(task for task, is_bad in zip(tasks, bad, strict=True) if is_bad)
        self.in_bad_micro_batches += dict.fromkeys(tasks)

    @property
    def policy_kl(self) -> float:
        """KL divergence from the policy before the update to the present one, per action."""
        return self.sums.get("kl/policy", 0.0) / max(self.sums.get("actions", 0.0), 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """The loss of a minibatch, the sum of its micro-batches' losses, which are measured in `done`."""

    algorithm: Algorithm
    scale: float
    """Number of groups in the batch over that in the minibatch: `Sample.weight` refers to the batch."""
    done: PassResult

    def loss(self, scores: TokenScores, micro: MicroBatch) -> Tensor:
        """`scale` times the loss of a micro-batch, with that of a value head."""
        loss, sums = policy_terms(scores, micro, self.algorithm)
        self.done.logprobs.append((micro, scores.logprobs_A.detach()))
        if scores.values_A is not None:
            value_loss, value_sums = value_terms(scores.values_A, micro, self.algorithm)
            loss, sums = loss + value_loss, sums | value_sums
        # a non-finite log-prob of the engine means that it drew a token of probability 0: an error even where the loss
        # does not read it
        finite = torch.stack([loss, *(given_A.sum() for given_A in micro.given_logprobs)]).isfinite().all()
        # a minibatch stands for the whole batch in its optimizer step
        weighed = {"loss": self.scale * loss.detach(), "policy_loss": self.scale * sums["policy_loss"]}
        actions = torch.full_like(loss, len(micro.weights_A), dtype=torch.float64)
        self.done.measure(micro, finite, sums | weighed | {"actions": actions}, scores.logprobs_A, scores.values_A)
        return self.scale * loss

    def value_loss(self, values_A: Tensor, micro: MicroBatch) -> Tensor:
        """`scale` times the loss of a separate value model."""
        loss, sums = value_terms(values_A, micro, self.algorithm)
        weighed = {"loss": self.scale * loss.detach()}
        self.done.measure(micro, torch.isfinite(loss), sums | weighed, values_A)
        return self.scale * loss

    def loss_gradients(self, micro: MicroBatch, times: int = 1) -> LossGradients | None:
        """Derivatives of `times` the policy loss of a micro-batch (`precomputed_loss_gradients`)."""
        return precomputed_loss_gradients(micro, self.algorithm, times * self.scale)
