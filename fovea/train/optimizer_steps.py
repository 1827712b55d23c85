"""The optimizer steps of an update, as every backend takes them, and those that it leaves out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fovea.config.run import Algorithm
from fovea.errors import TrainError
from fovea.samples import has_old_logprobs, old_logprobs, with_old_logprobs
from fovea.train.deal import Schedule
from fovea.train.packing import MicroBatch
from fovea.train.pass_result import PassResult
from fovea.train.ranks import Ranks
from fovea.train.row_dealer import in_batch_order
from fovea.train.update_metrics import UpdateStats
from fovea.types import Batch, SampleGroup

Minibatch: TypeAlias = Sequence[SampleGroup]


class ClippedOptimizer(Protocol):
    """An optimizer as an update sees it: it clips a gradient, then steps by it."""

    def clip(self) -> float:
        """The norm of the gradient before it is clipped, here or in `step`; the same on all ranks."""
        ...

    def step(self) -> None:
        """Take a step by the clipped gradient."""
        ...


def are_scored(batch: Batch, algorithm: Algorithm) -> bool:
    """Whether the batch's old log-probs come from a pass of the trainer, not from the engine or from none at all."""
    return has_old_logprobs(batch) and algorithm.old_logprobs == "trainer"


def run_epochs(
    batch: Batch,
    stats: UpdateStats,
    schedule: Schedule,
    ranks: Ranks,
    *,
    gradients: Callable[[Minibatch, float], PassResult],
    step: Callable[[Minibatch], bool],
) -> list[NDArray[np.float32]]:
    """Run the epochs of an update; returns the trainer's log-probs [T] of every sample as they were before it.

    `gradients` accumulates those of a minibatch times a scale: a loss is a share of the batch, a step is by a minibatch
    alone. Without log-probs from an earlier pass of the trainer, those of the first epoch are returned, and are the old
    log-probs of later epochs; nothing where that epoch has several minibatches, whose log-probs are of different
    weights, or ended early.
    """
    algorithm, scored = schedule.algorithm, are_scored(batch, schedule.algorithm)
    before = old_logprobs(batch) if scored else []
    for epoch in range(algorithm.ppo_epochs):
        minibatches = schedule.minibatches(epoch, batch.groups)
        found = _run_epoch(minibatches, stats, gradients, step, algorithm.max_policy_kl)
        if found is None:
            break
        if epoch == 0 and not scored and len(minibatches) == 1:
            before = in_batch_order(found, batch.groups, ranks)
            batch = batch if has_old_logprobs(batch) else with_old_logprobs(batch, before)
    return before


def _run_epoch(
    minibatches: Sequence[Minibatch],
    stats: UpdateStats,
    gradients: Callable[[Minibatch, float], PassResult],
    step: Callable[[Minibatch], bool],
    max_policy_kl: float | None,
) -> list[tuple[MicroBatch, Tensor]] | None:
    """Accumulate the gradients of each minibatch and take its step; returns the log-probs of all passes.

    None if the update ends before the last step: by a number that is not finite, or by `max_policy_kl`.
    """
    stats.minibatches = len(minibatches)
    num_groups = sum(map(len, minibatches))
    logprobs = []
    for groups in minibatches:
        done = gradients(groups, num_groups / len(groups))
        stats.add(done.sums, done.policy_kl)
        # before the step: the pass has measured the KL divergence of the weights as they are
        too_far = stats.moved_too_far(max_policy_kl)
        stats.not_finite = done.bad_tasks
        if stats.not_finite or too_far or not step(groups):
            return None
        logprobs += done.logprobs
    return logprobs


def take_step(
    optimizers: Sequence[ClippedOptimizer],
    stats: UpdateStats,
    *,
    critic_alone: bool,
    bad_tasks: Callable[[], list[str]],
) -> bool:
    """Take the steps of the policy and, if there is one, the value function; returns whether they were taken.

    No step is taken if a gradient is not finite; `stats.not_finite` then gets `bad_tasks()`. `critic_alone`: only the
    value function steps.
    """
    norms = [optimizer.clip() for optimizer in optimizers]
    if not np.isfinite(norms).all():
        stats.not_finite = bad_tasks()
        return False
    stats.norms.append(norms)
    for optimizer in optimizers[1:] if critic_alone else optimizers:
        optimizer.step()
    return True


class SkippedUpdates:
    """Counts the updates that ended without their last step, as long as they follow one another."""

    def __init__(self, limit: int) -> None:
        """`limit` is `train.max_skipped_updates`."""
        self._limit = limit
        self.in_a_row = 0

    def count(self, not_finite: Sequence[str], step: int) -> None:
        """Count update number `step`, which the tasks `not_finite` ended, if any did; TrainError beyond the limit."""
        self.in_a_row = self.in_a_row + 1 if not_finite else 0
        if self.in_a_row > self._limit:
            raise TrainError(
                f"a loss, a log-prob or a gradient is not finite at step {step}, as in all of the last "
                f"{self._limit + 1} updates, with the samples of {', '.join(not_finite[:3])}; lower "
                "train.learning_rate (or algorithm.advantage.critic.learning_rate), which may change on resume, or "
                "look for non-finite values in the model and the rewards"
            )
