"""The learning rate of each step of a run."""

from __future__ import annotations

import math
from typing import Literal


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
