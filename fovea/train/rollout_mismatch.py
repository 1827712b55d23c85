"""How far the engine that drew the actions of a step is from the trainer that learns from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from fovea.algorithms.kl import k3
from fovea.types import Metrics, SampleGroup


def mismatch(groups: Iterable[SampleGroup], old_logprobs: Sequence[NDArray[np.float32]]) -> Metrics:
    """Over all actions of the groups, lp the engine's and lp_old the trainer's, of which there is one [T] per sample.

    k1 is the mean of lp - lp_old, `kl` the k3 estimate, `abs` and `max` are of the difference itself. Empty without
    groups.
    """
    rollout = [sample.rollout_logprobs_T for group in groups for sample in group.samples]
    if not rollout:
        return {}
    rollout_A, old_A = torch.from_numpy(np.concatenate(rollout)), torch.from_numpy(np.concatenate(old_logprobs))
    difference_A = rollout_A - old_A
    return {
        "rollout_train_k1": float(difference_A.mean()),
        "rollout_train_kl": float(k3(rollout_A, old_A).mean()),
        "rollout_train_abs": float(difference_A.abs().mean()),
        "rollout_train_max": float(difference_A.abs().max()),
    }
