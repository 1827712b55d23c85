"""The learning rate of each step of a run."""

from __future__ import annotations

import math
from typing import Literal

from fovea.config.algorithm_parts import Critic
from fovea.config.sections import Train

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
    """Learning rate of step 0, 1, ... of a run with these settings, for weights with a peak rate of their own."""
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
