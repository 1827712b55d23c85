"""The optimizer steps of an update, as every backend takes them, and those that it leaves out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fovea.config.algorithm import Algorithm, Critic
from fovea.config.sections import Train
from fovea.errors import TrainError
from fovea.samples import has_old_logprobs, old_logprobs, with_old_logprobs
from fovea.train.packing import MicroBatch
from fovea.train.pass_result import PassResult
from fovea.train.ranks import Ranks
from fovea.train.row_assignment import Schedule
from fovea.train.row_dealer import in_batch_order
from fovea.train.update_metrics import UpdateStats
from fovea.types import Batch, SampleGroup

RATE_RATIO = "rate_ratio"
"""Key of a parameter group: its learning rate relative to the optimizer's."""


def make_adamw(
    parameters: Sequence[Tensor],
    *,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    rate_ratios: Sequence[float] | None = None,
) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) with a learning rate of 0, to be set before every step.

    Matrices decay, LoRA's two and a value head's among them. Vectors do not: they are biases, and scales of norms,
    which decay would draw to 0. `rate_ratios` are learning rates of parameters relative to the optimizer's; default: 1.
    """
    groups: dict[tuple[bool, float], list[Tensor]] = {}
    for parameter, ratio in zip(parameters, rate_ratios or [1.0] * len(parameters), strict=True):
        groups.setdefault((parameter.dim() > 1, ratio), []).append(parameter)
    given = [
        {"params": members, "weight_decay": weight_decay if are_matrices else 0.0, RATE_RATIO: ratio}
        for (are_matrices, ratio), members in groups.items()
    ]
    return torch.optim.AdamW(given, lr=0.0, betas=betas, eps=eps, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of an optimizer of `make_adamw`: each group's is `rate` times its ratio."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group[RATE_RATIO]


CRITIC_RATE_OVER_POLICY = 20
"""Ratio of the value function's learning rate to the policy's where algorithm.advantage.critic.learning_rate is unset:
1e-5 to 5e-7, at any scale (decision 009)."""


def learning_rate(
    step: int,
    *,
    peak: float,
    warmup_steps: int,
    total_steps: int,
    shape: Literal["constant", "linear", "cosine"],
    final_frac: float,
) -> float:
    """Learning rate of step 0, 1, ...: linear warm-up over `warmup_steps`, then `shape` down to `final_frac` x peak."""
    rise = min(1.0, (step + 1) / max(warmup_steps, 1))
    if shape == "constant":
        return peak * rise
    progress = min(1.0, max(0, step - warmup_steps) / max(total_steps - warmup_steps, 1))
    left = 1 - progress if shape == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return peak * rise * (final_frac + (1 - final_frac) * left)


def rate_of_run(step: int, train: Train, *, peak: float, max_steps: int) -> float:
    """Learning rate of step 0, 1, ... of a run with these settings, for weights with a separate peak rate."""
    return learning_rate(
        step,
        peak=peak,
        warmup_steps=train.lr_warmup_steps,
        total_steps=max_steps,
        shape=train.lr_schedule,
        final_frac=train.final_lr_frac,
    )


def critic_rate(critic: Critic, train: Train) -> float:
    """Peak learning rate of the value function."""
    return critic.learning_rate or CRITIC_RATE_OVER_POLICY * train.learning_rate


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
    """True if the batch's old log-probs come from a pass of the trainer, not from the engine or from none at all."""
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

    `gradients` accumulates those of a minibatch times a scale: a loss is a share of the batch, a step uses one
    minibatch. Without log-probs from an earlier pass of the trainer, those of the first epoch are returned, and are the
    old log-probs of later epochs; nothing where that epoch has several minibatches, whose log-probs are of different
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
