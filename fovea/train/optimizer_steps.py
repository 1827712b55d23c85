"""The optimizer steps of an update, as every backend takes them, and those that it leaves out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import numpy as np
from torch import Tensor

from fovea.errors import TrainError
from fovea.train.packing import MicroBatch
from fovea.train.pass_result import PassResult
from fovea.train.update_metrics import UpdateStats
from fovea.types import SampleGroup

Minibatch: TypeAlias = Sequence[SampleGroup]


class Stepper(Protocol):
    """An optimizer as an update sees it."""

    def clip(self) -> float:
        """The norm of the gradient before it is clipped, here or in `step`; the same on all ranks."""
        ...

    def step(self) -> None:
        """Take a step by the clipped gradient."""
        ...


def run_epoch(
    minibatches: Sequence[Minibatch],
    stats: UpdateStats,
    *,
    gradients: Callable[[Minibatch], PassResult],
    step: Callable[[Minibatch], bool],
    max_policy_kl: float | None,
) -> list[tuple[MicroBatch, Tensor]] | None:
    """Accumulate the gradients of each minibatch and take its step; returns the log-probs of all passes.

    None if the update ends before the last step: by a number that is not finite, or by `max_policy_kl`. Log-probs of
    several minibatches are of different weights.
    """
    stats.minibatches = len(minibatches)
    logprobs = []
    for groups in minibatches:
        done = gradients(groups)
        stats.add(done.sums, done.policy_kl)
        # before the step: the pass has measured the KL divergence of the weights as they are
        too_far = stats.moved_too_far(max_policy_kl)
        stats.not_finite = done.bad_tasks
        if stats.not_finite or too_far or not step(groups):
            return None
        logprobs += done.logprobs
    return logprobs


def take_step(
    optimizers: Sequence[Stepper], stats: UpdateStats, *, critic_alone: bool, bad_tasks: Callable[[], list[str]]
) -> bool:
    """Take the steps of the policy and, if there is one, the value function; returns whether they were taken.

    None is where a gradient is not finite, for which `bad_tasks` names the tasks. `critic_alone`: only the value
    function's is.
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
