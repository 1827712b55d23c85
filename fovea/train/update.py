"""An update of the policy, the same on every backend (docs/step.md).

Rows are packed into micro-batches; each runs forward and backward through the loss; then gradients are clipped and the
optimizers step. If memory runs out, the passes start again with smaller micro-batches.

Axes: `T` tokens of a completion.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fovea.config.algorithm import Algorithm
from fovea.config.model import Model
from fovea.config.run import Config
from fovea.config.sections import Train, Warmup
from fovea.errors import TrainError, memory_for
from fovea.models.activation_tape import Tape
from fovea.models.load import save_network
from fovea.models.policy_network import PolicyNetwork
from fovea.models.shared_prefix.layout import PackedRow
from fovea.models.token_logprobs import TokenScores
from fovea.models.weights_to_sync import WeightToSync
from fovea.samples import (
    has_old_logprobs,
    old_logprobs,
    on_masked,
    with_masked_logprobs,
    with_old_logprobs,
    with_reference_logprobs,
    with_values,
    without_masked,
)
from fovea.train.base import ModelFacts, Needs, PolicyOptimizer, SftExample
from fovea.train.loss import PassResult
from fovea.train.microbatches import MicroBatcher, MicrobatchLimit, in_batch_order
from fovea.train.packing import MicroBatch
from fovea.train.ranks import ALONE, Ranks
from fovea.train.row_assignment import Cost
from fovea.train.schedule import ImagesByRank, UpdatePasses
from fovea.train.sft import SupervisedTrainer
from fovea.train.update_metrics import UpdateStats, batch_mismatch
from fovea.types import Batch, Metrics, SampleGroup
from fovea.utils.host_waits import awaited

FEWER_WEIGHTS = "train fewer weights (model.lora, model.freeze_vision_tower), or on more processes"
Scored = list[tuple[MicroBatch, TokenScores]]
"""This rank's micro-batches with the scores of their actions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyAccess:
    """The settings of the run, and its model as a folder or as a network."""

    config: Config
    model: Model
    """Its path is set."""
    banned_ids: Sequence[int]
    network: PolicyNetwork | None = None
    """The network to train in place, for a backend that shares it."""
    tape: Tape | None = None
    """Activations of the rollout that the update reuses."""
    ranks: Ranks = ALONE


class TrainedPolicy(ABC):
    """One process of a policy, with the driver's calls (`train.base.Policy`); backends implement its passes."""

    def __init__(  # noqa: PLR0913 (the settings of a whole policy, and its place among the processes)
        self,
        vlm: PolicyNetwork,
        *,
        train: Train,
        algorithm: Algorithm,
        warmup: Warmup | None,
        batcher: MicroBatcher,
        reference_batcher: MicroBatcher | None,
        limit: MicrobatchLimit,
        results: Ranks,
        everyone: Ranks,
    ) -> None:
        """Results of passes are merged over the ranks `results`; `everyone` is all ranks of the policy.

        `reference_batcher` is None without a separate reference model.
        """
        self._vlm = vlm
        self._train = train
        self._algorithm = algorithm
        self._warmup = warmup
        self._batcher = batcher
        self._reference_batcher = reference_batcher
        self._limit = limit
        self._ranks = results
        self._everyone = everyone
        self._sft: SupervisedTrainer | None = None
        self._steps = 0
        self._skipped_in_a_row = 0
        """Number of consecutive updates that ended without their last step."""

    @property
    @abstractmethod
    def _optimizers(self) -> Sequence[PolicyOptimizer]:
        """Optimizers of the policy and, if there is one, of the value function."""

    @abstractmethod
    def _forward(self, batch: Batch) -> Scored:
        """Scores under the current weights, without gradients."""

    @abstractmethod
    def _forward_reference(self, batch: Batch) -> Scored:
        """Scores under the reference: the weights from before RL."""

    @property
    @abstractmethod
    def _value_model(self) -> Callable[[PackedRow], Tensor] | None:
        """A separate model that returns values [A]; None without one (a value head's values are in the scores)."""

    @abstractmethod
    def _update_mode(self) -> AbstractContextManager[None]:
        """A context with the models in training mode, for the passes of one update."""

    @abstractmethod
    def _backward(self, groups: Sequence[SampleGroup], scale: float) -> PassResult:
        """Run forward and backward passes over the groups, adding up the gradients of `scale` times their loss."""

    @abstractmethod
    def _tasks_of_bad_gradients(self, groups: Sequence[SampleGroup]) -> list[str]:
        """Ids of the tasks that may have given a non-finite gradient despite a finite loss."""

    @abstractmethod
    def _weights_changed(self) -> None:
        """Note that the engines' weights are out of date."""

    @abstractmethod
    def _pass_metrics(self) -> Metrics:
        """Metrics of the passes of the update that has just ended."""

    @abstractmethod
    def _supervised_trainer(self, settings: Warmup) -> SupervisedTrainer:
        """A trainer for the warm-up."""

    @abstractmethod
    def _merged_weights(self) -> Iterable[tuple[str, Tensor]]:
        """Full weights with adapters merged, by Hugging Face name; all ranks must call it together."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Dtype of the weights in an engine; trained weights may be float32 shards here."""

    @abstractmethod
    def weights_to_sync(self) -> Iterable[WeightToSync]:
        """The weights for a sync, with adapters separate; each full weight is gathered when it is reached."""

    @abstractmethod
    def merged_weights_to_sync(self) -> Iterable[WeightToSync]:
        """The weights for a sync to an engine without support for adapters."""

    @abstractmethod
    def snapshot_reference(self) -> None:
        """Copy the current weights into master weights, reference and value function, and free the SFT optimizer."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Copy this process's part of the state to host memory, and begin to write it."""

    @abstractmethod
    def finish_save(self) -> None:
        """Wait until everything from `save` is on disk; raises an error of the write. Called on a separate thread."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Restore the state that `save` wrote; TrainError when it belongs to another model."""

    @abstractmethod
    def describe(self) -> ModelFacts:
        """Device, parameter counts and number of ranks."""

    def logprobs(self, batch: Batch) -> list[NDArray[np.float32]]:
        """Log-probs [T] of every sample under the current weights, on all ranks."""
        return self._in_batch_order(((micro, scores.logprobs_A) for micro, scores in self._forward(batch)), batch)

    def reference_logprobs(self, batch: Batch) -> list[NDArray[np.float32]]:
        """Log-probs [T] of every sample under the reference, on all ranks."""
        scored = self._forward_reference(batch)
        return self._in_batch_order(((micro, scores.logprobs_A) for micro, scores in scored), batch)

    def logprobs_and_values(self, batch: Batch) -> tuple[list[NDArray[np.float32]], list[NDArray[np.float32]]]:
        """Log-probs and values [T] of every sample, from one pass of a policy with a value head."""
        scored = self._forward(batch)
        values = [(micro, scores.values_A) for micro, scores in scored if scores.values_A is not None]
        assert len(values) == len(scored), "values were requested, but the policy has no value head"
        logprobs = [(micro, scores.logprobs_A) for micro, scores in scored]
        return self._in_batch_order(logprobs, batch), self._in_batch_order(values, batch)

    @torch.no_grad()
    def values(self, batch: Batch) -> list[NDArray[np.float32]]:
        """Values [T] of every sample, from a pass of a separate value model."""
        model = self._value_model
        assert model is not None, "the value head is on the policy's trunk; call logprobs_and_values"
        return self._in_batch_order(
            [(micro, model(micro.row)) for micro in self._batcher.micro_batches(batch.groups)], batch
        )

    def compute_logprobs(self, batch: Batch, needs: Needs) -> Batch:
        """Add the required log-probs and values to the samples of a batch, and drop its masked pictures."""
        clean = without_masked(batch)
        passes = partial(self._with_logprobs, clean, on_masked(batch), needs)
        if needs.beside_engine:
            return self._limit.beside_engine(passes, clean.groups)
        return self._limit.fit(passes, clean.groups, self._cost)

    def _with_logprobs(self, batch: Batch, masked: Batch, needs: Needs) -> Batch:
        # a value head on the policy's trunk gives values and log-probs in one pass
        joint = needs.values and self._value_model is None
        if joint:
            logprobs, values = self.logprobs_and_values(batch)
            batch = with_values(batch, values)
            # old log-probs that come from the engine are already set
            batch = batch if has_old_logprobs(batch) else with_old_logprobs(batch, logprobs)
        elif needs.old_logprobs:
            batch = with_old_logprobs(batch, self.logprobs(batch))
        if needs.values and not joint:
            batch = with_values(batch, self.values(batch))
        if needs.reference_logprobs:
            batch = with_reference_logprobs(batch, self.reference_logprobs(batch))
        if needs.masked_logprobs:
            batch = with_masked_logprobs(batch, self.logprobs(masked))
        return batch

    @memory_for("a step of the warm-up", "lower warmup.batch_size")
    def sft(self, pairs: Sequence[SftExample]) -> Metrics:
        """Take one step of supervised fine-tuning. Its optimizer is freed by `snapshot_reference`."""
        assert self._warmup is not None, "supervised steps, but the policy was made without settings for them"
        if self._sft is None:
            self._sft = self._supervised_trainer(self._warmup)
        self._limit.free_memory()  # a warm-up step cannot start again when memory runs out
        self._weights_changed()
        return {"loss": self._sft.update(pairs)}

    def update(self, batch: Batch) -> Metrics:
        """Run `ppo_epochs` epochs of `minibatches` optimizer steps each; none if the batch has no groups.

        A minibatch with a non-finite loss or gradient ends the update without its step; TrainError when that happens in
        more than `max_skipped_updates` updates in a row.
        """
        stats, schedule = UpdateStats(), self._schedule
        rates = [optimizer.set_rate(self._steps) for optimizer in self._optimizers]
        one_step = self._algorithm.minibatches == 1 or not batch.groups
        assert one_step or has_old_logprobs(batch), "old log-probs are missing: the second step is off-policy"
        # groups that the update leaves out need log-probs only for the comparison with the engine
        left_out: list[NDArray[np.float32]] | None = None
        if schedule.is_plain:
            others = Batch(groups=batch.left_out)
            left_out = self._limit.fit(lambda: self.logprobs(others), others.groups, self._cost)
        if batch.groups:
            self._make_moments()
        with self._update_mode():
            before = self._run_epochs(batch, schedule, stats)
        self._steps += 1
        self._count_skipped(stats.not_finite)
        # linear outputs from the tape are the engine's own: log-probs made from them would hide part of the difference
        own = _are_scored(batch, self._algorithm) or not stats.sums.get("reused_actions", 0)
        metrics = {"updates_skipped": float(bool(stats.not_finite))} | self._limit.metrics()
        metrics |= dict(zip(("learning_rate", "learning_rate/value"), rates, strict=False))
        metrics |= batch_mismatch(batch, before, left_out) if own else {}
        if not batch.groups:
            return {"loss": 0.0, "grad_norm": 0.0, "actions_trained": 0.0} | metrics
        balance = self._batcher.balance(schedule.minibatches(0, batch.groups))
        return stats.metrics() | metrics | balance | self._pass_metrics()

    def _run_epochs(self, batch: Batch, schedule: UpdatePasses, stats: UpdateStats) -> list[NDArray[np.float32]]:
        """Take the optimizer steps; returns the trainer's log-probs [T] of every sample as they were before them.

        Without log-probs from an earlier pass of the trainer, those of the first epoch are returned and serve as the
        old log-probs of later epochs. The list is empty if that epoch ended early, or if it has several minibatches,
        whose log-probs are of different weights. A non-finite number or `max_policy_kl` ends the update before the next
        step.
        """
        scored = _are_scored(batch, self._algorithm)
        before = old_logprobs(batch) if scored else []
        num_models = 1 if self._value_model is None else 2
        for epoch in range(self._algorithm.ppo_epochs):
            minibatches = schedule.minibatches(epoch, batch.groups)
            stats.minibatches = len(minibatches)
            num_groups, logprobs = sum(map(len, minibatches)), list[tuple[MicroBatch, Tensor]]()
            for groups in minibatches:
                # a loss is a share of the whole batch's, and a step uses only one minibatch
                passes = partial(self._gradients, groups, num_groups / len(groups))
                done = self._limit.fit(passes, groups, self._cost)
                stats.flops += num_models * sum(map(self._cost.flops, groups))
                stats.add(done.sums, done.policy_kl)
                # before the step: the pass has measured the KL divergence of the current weights
                too_far = stats.moved_too_far(self._algorithm.max_policy_kl)
                stats.not_finite = list(done.bad_tasks)
                if stats.not_finite or too_far or not self._step(groups, stats):
                    return before
                logprobs += done.logprobs
            if epoch == 0 and not scored and len(minibatches) == 1:
                before = self._in_batch_order(logprobs, batch)
                batch = batch if has_old_logprobs(batch) else with_old_logprobs(batch, before)
        return before

    def _gradients(self, groups: Sequence[SampleGroup], scale: float) -> PassResult:
        """Replace the gradients of the previous minibatch, or of a failed attempt, with those of this one."""
        self._free_gradients()
        return self._backward(groups, scale)

    @memory_for("the optimizer step", FEWER_WEIGHTS)
    def _step(self, groups: Sequence[SampleGroup], stats: UpdateStats) -> bool:
        """Take a step of all optimizers unless a gradient is non-finite; returns whether it was taken."""
        norms = [float(awaited(optimizer.clip())) for optimizer in self._optimizers]
        if not np.isfinite(norms).all():
            stats.not_finite = self._tasks_of_bad_gradients(groups)
            return False
        stats.norms.append(norms)
        # values near their initial 0 make poor advantages: only the critic trains at first
        critic = self._algorithm.critic
        first = 1 if critic is not None and self._steps < critic.warmup_steps else 0
        for optimizer in self._optimizers[first:]:
            optimizer.step()
        self._weights_changed()
        return True

    @memory_for("the moments of the optimizer", FEWER_WEIGHTS)
    def _make_moments(self) -> None:
        """Allocate all moments before the passes of the first update: a step that fails midway cannot be repeated."""
        for optimizer in self._optimizers:
            self._limit.with_all_memory(optimizer.make_moments)

    def _free_gradients(self) -> None:
        """Free all gradients, for the rollout's memory and so that the next pass starts from zero."""
        for optimizer in self._optimizers:
            optimizer.zero_grad()

    @property
    def _cost(self) -> Cost:
        return self._batcher.assignment.cost

    def _in_batch_order(self, scored: Iterable[tuple[MicroBatch, Tensor]], batch: Batch) -> list[NDArray[np.float32]]:
        return in_batch_order(scored, batch.groups, self._ranks)

    def _count_skipped(self, not_finite: Sequence[str]) -> None:
        """Count the update if the tasks in `not_finite` ended it; TrainError above max_skipped_updates in a row."""
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if not_finite else 0
        if self._skipped_in_a_row > self._train.max_skipped_updates:
            raise TrainError(
                f"a loss, a log-prob or a gradient is not finite at step {self._steps}, as in all of the last "
                f"{self._skipped_in_a_row} updates, with the samples of {', '.join(not_finite[:3])}; lower "
                "train.learning_rate (or algorithm.advantage.critic.learning_rate), which may change on resume, or "
                "look for non-finite values in the model and the rewards"
            )

    @property
    def _schedule(self) -> UpdatePasses:
        return UpdatePasses(
            algorithm=self._algorithm,
            plain_update_every_steps=self._train.plain_update_every_steps,
            step=self._steps,
        )

    def images_by_rank(self) -> ImagesByRank:
        """The images that each rank needs in the calls of the current step."""
        return ImagesByRank(
            policy=self._batcher.assignment,
            reference=None if self._reference_batcher is None else self._reference_batcher.assignment,
            schedule=self._schedule,
            limit_tokens=self._limit.max_tokens,
            shares=self._shares,
        )

    @property
    def _shares(self) -> tuple[int, ...]:
        """Index of the share of micro-batches that each process runs, by rank; empty if each runs a separate one."""
        return ()

    def set_free_memory(self, free_memory: Callable[[], bool]) -> None:
        """Set the function that frees memory before micro-batches become smaller (`MicrobatchLimit.free_memory`)."""
        self._limit.free_memory = free_memory

    def limit_microbatches(self, max_tokens: int) -> None:
        """Pack micro-batches of at most `max_tokens`, if that is less than the setting."""
        self._limit.lower(max_tokens)

    def export(self, folder: Path) -> None:
        """Write a Hugging Face model folder: the current weights with adapters merged, and their config."""
        # every rank takes part, since a full tensor is gathered from all; only the first rank keeps them
        first = self._everyone.is_first
        weights = {name: weight.detach().cpu() for name, weight in self._merged_weights() if first}
        self._everyone.run_on_first(lambda: save_network(self._vlm, folder, weights.items()))

    def close(self) -> None:  # noqa: B027 (a backend may have something to close)
        """Do nothing: memory is freed with the last reference or with the process."""

    @property
    def _counts(self) -> dict[str, int]:
        """Counters that a checkpoint stores."""
        return {"steps": self._steps, "skipped_in_a_row": self._skipped_in_a_row}


def _are_scored(batch: Batch, algorithm: Algorithm) -> bool:
    """True if the batch has old log-probs from a pass of the trainer, rather than from the engine."""
    return has_old_logprobs(batch) and algorithm.old_logprobs == "trainer"
