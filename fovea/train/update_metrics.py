"""The sums of an update's passes, and the metrics that they become."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fovea.types import Metrics

LOSSES = ("loss", "policy_loss")
"""Weighed as they are minimised: a mean over optimizer steps, not over actions."""
COUNTS = ("actions", "reused_images")


@dataclass(slots=True)
class Tally:
    """Of one update."""

    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    norms: list[list[float]] = field(default_factory=list)
    """For each step, of the gradients before clipping: the policy's, and the value function's where there is one."""
    minibatches: int = 1
    """Into which the batch was cut."""
    policy_kl: float = 0.0
    """Of the last pass: how far the steps before it had moved the policy."""
    passes: int = 0
    """Over a minibatch, whether a step was taken or not."""
    operations: float = 0.0
    """That the passes need, by the model's sizes."""
    logprobs: list[NDArray[np.float32]] = field(default_factory=list)
    """[T] of every sample, by the last whole pass over the batch; none where that is cut into minibatches."""
    not_finite: list[str] = field(default_factory=list)
    """Tasks for which the last step was left out."""

    def add(self, sums: Mapping[str, float], policy_kl: float) -> None:
        """Of one pass over a minibatch."""
        self.passes += 1
        self.policy_kl = policy_kl
        for key, value in sums.items():
            self.sums[key] += value

    def metrics(self) -> Metrics:
        """Losses per optimizer step, everything else a mean over the actions of all passes."""
        actions = max(self.sums["actions"], 1.0)
        means = {key: x / actions for key, x in self.sums.items() if key not in (*LOSSES, *COUNTS)}
        reused = means.pop("reused_actions", 0.0)
        return {
            **{key: self.sums[key] / max(self.passes, 1) for key in LOSSES},
            **means,
            "actions_trained": self.sums["actions"],
            "reused_frac": reused,
            "reused_images": self.sums["reused_images"],
            "update_tflop": self.operations / 1e12,
            "epochs_run": len(self.norms) / max(self.minibatches, 1),
            "kl/policy": self.policy_kl,
            **self._mean_norms(),
        }

    def _mean_norms(self) -> Metrics:
        of_steps = zip(*self.norms, strict=True)
        means = [sum(norms) / len(norms) for norms in of_steps] or [0.0]
        return dict(zip(("grad_norm", "grad_norm/value"), means, strict=False))
