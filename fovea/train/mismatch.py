"""How far the engine that drew the actions of a step is from the trainer that learns from them."""

from __future__ import annotations

import numpy as np
import torch

from fovea.algorithms.kl import k3
from fovea.types import Batch, Metrics


def mismatch(batch: Batch) -> Metrics:
    """Over all actions of the batch, lp the engine's and lp_old the trainer's; empty where the latter are not there.

    k1 is the mean of lp - lp_old, `kl` the k3 estimate, `abs` and `max` are of the difference itself.
    """
    old = [sample.old_logprobs_T for sample in batch.samples if sample.old_logprobs_T is not None]
    if not old or len(old) != len(batch.samples):
        return {}
    old_A = torch.from_numpy(np.concatenate(old))
    rollout_A = torch.from_numpy(np.concatenate([sample.rollout_logprobs_T for sample in batch.samples]))
    difference_A = rollout_A - old_A
    return {
        "rollout_train_k1": float(difference_A.mean()),
        "rollout_train_kl": float(k3(rollout_A, old_A).mean()),
        "rollout_train_abs": float(difference_A.abs().mean()),
        "rollout_train_max": float(difference_A.abs().max()),
    }
