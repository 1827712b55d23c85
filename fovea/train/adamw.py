"""AdamW and the schedule of its learning rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fovea.config.algorithm import Critic
from fovea.config.sections import Train, Warmup

RATE_RATIO = "rate_ratio"
"""Key of a parameter group: its learning rate relative to the optimizer's."""
WARMUP_EPS = 1e-8
CRITIC_RATE_OVER_POLICY = 20
"""Ratio of the value function's learning rate to the policy's where algorithm.advantage.critic.learning_rate is unset:
1e-5 to 5e-7, at any scale (decision 009)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWSettings:
    """Settings of AdamW and of its learning-rate schedule, for the weights of one optimizer."""

    peak_rate: float
    warmup_steps: int
    total_steps: int
    schedule: Literal["constant", "linear", "cosine"]
    final_frac: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    max_grad_norm: float

    @staticmethod
    def of_run(train: Train, *, max_steps: int, peak_rate: float | None = None) -> AdamWSettings:
        """Settings for RL; `peak_rate` replaces train.learning_rate for weights with a separate rate."""
        return AdamWSettings(
            peak_rate=train.learning_rate if peak_rate is None else peak_rate,
            warmup_steps=train.lr_warmup_steps,
            total_steps=max_steps,
            schedule=train.lr_schedule,
            final_frac=train.final_lr_frac,
            betas=train.betas,
            eps=train.adam_eps,
            weight_decay=train.weight_decay,
            max_grad_norm=train.max_grad_norm,
        )

    @staticmethod
    def of_critic(critic: Critic, train: Train, *, max_steps: int) -> AdamWSettings:
        """Settings for PPO's value function."""
        peak_rate = critic.learning_rate or CRITIC_RATE_OVER_POLICY * train.learning_rate
        return AdamWSettings.of_run(train, max_steps=max_steps, peak_rate=peak_rate)

    @staticmethod
    def of_warmup(warmup: Warmup) -> AdamWSettings:
        """Settings for supervised fine-tuning."""
        return AdamWSettings(
            peak_rate=warmup.learning_rate,
            warmup_steps=warmup.lr_warmup_steps,
            total_steps=warmup.max_steps,
            schedule="constant",
            final_frac=1.0,
            betas=(0.9, 0.95),
            eps=WARMUP_EPS,
            weight_decay=0.01,
            max_grad_norm=1.0,
        )

    def rate(self, step: int) -> float:
        """Learning rate of step 0, 1, ...: linear warm-up, then `schedule` down to `final_frac` times the peak."""
        # above 0 from the first step on: a step with a rate of 0 would change nothing
        rise = min(1.0, (step + 1) / max(self.warmup_steps, 1))
        if self.schedule == "constant":
            return self.peak_rate * rise
        progress = min(1.0, max(0, step - self.warmup_steps) / max(self.total_steps - self.warmup_steps, 1))
        left = 1 - progress if self.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return self.peak_rate * rise * (self.final_frac + (1 - self.final_frac) * left)


def make_adamw(
    parameters: Sequence[Tensor], settings: AdamWSettings, rate_ratios: Sequence[float] | None = None
) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) with a learning rate of 0, to be set before every step.

    Weight decay applies to matrices, including those of LoRA and of a value head. It does not apply to vectors, which
    are biases and norm scales that it would pull towards 0. `rate_ratios` are learning rates of parameters relative to
    the optimizer's (default: 1).
    """
    groups: dict[tuple[bool, float], list[Tensor]] = {}
    for parameter, ratio in zip(parameters, rate_ratios or [1.0] * len(parameters), strict=True):
        groups.setdefault((parameter.dim() > 1, ratio), []).append(parameter)
    given = [
        {"params": members, "weight_decay": settings.weight_decay if are_matrices else 0.0, RATE_RATIO: ratio}
        for (are_matrices, ratio), members in groups.items()
    ]
    return torch.optim.AdamW(given, lr=0.0, betas=settings.betas, eps=settings.eps, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of an optimizer from `make_adamw`: each group gets `rate` times its ratio."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group[RATE_RATIO]
