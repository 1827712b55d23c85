"""Times of steps and their statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds of one step. Rollout: from rows to scored completions; train: all the rest."""

    step: float
    rollout: float
    train: float
    tokens: float
    """Number of completion tokens generated and trained on."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each phase of Fovea's step, by its names in `fovea.loop.take_step`."""


def medians(steps: Sequence[StepTimes]) -> dict[str, float]:
    """Median seconds of step, rollout and training."""
    return {
        "step_seconds": median(times.step for times in steps),
        "rollout_seconds": median(times.rollout for times in steps),
        "train_seconds": median(times.train for times in steps),
    }


def spread(steps: Sequence[StepTimes]) -> float:
    """Relative spread of the step times: (slowest - fastest) / median."""
    whole = [times.step for times in steps]
    return (max(whole) - min(whole)) / median(whole)
