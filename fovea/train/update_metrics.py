"""What an update measures: sums over its passes, the distance of engine and trainer, the memory of activations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from fovea.algorithms.kl import k3
from fovea.types import Metrics, SampleGroup

GIB = 2**30

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


def mismatch(groups: Iterable[SampleGroup], old_logprobs: Sequence[NDArray[np.float32]]) -> Metrics:
    """Over all actions of the groups, lp the engine's and lp_old the trainer's, of which there is one [T] per sample.

    k1 is the mean of lp - lp_old, `kl` the k3 estimate, `abs` and `max` are of the difference itself. Empty without
    groups.
    """
    samples = [sample for group in groups for sample in group.samples]
    if not samples:
        return {}
    rollout_A = torch.from_numpy(np.concatenate([sample.rollout_logprobs_T[sample.mask_T] for sample in samples]))
    masked = (old_T[sample.mask_T] for old_T, sample in zip(old_logprobs, samples, strict=True))
    old_A = torch.from_numpy(np.concatenate(list(masked)))
    difference_A = rollout_A - old_A
    return {
        "rollout_train_k1": float(difference_A.mean()),
        "rollout_train_kl": float(k3(rollout_A, old_A).mean()),
        "rollout_train_abs": float(difference_A.abs().mean()),
        "rollout_train_max": float(difference_A.abs().max()),
    }


class ActivationMeter:
    """What autograd saves of the largest pass so far. A pass that is no larger runs as if there were no meter.

    Counted are the bytes of distinct storages, each in full, since a view keeps all of it; parameters are there anyway.
    What lives and dies within the forward pass, or is made in the backward pass, is not in it: with gradient
    checkpointing that is most, and the inputs of the layers remain.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._largest = 0
        self.num_bytes = 0

    @property
    def gib(self) -> float:
        return self.num_bytes / GIB

    @contextmanager
    def __call__(self, size: int) -> Iterator[None]:
        """Around a forward pass of this size, in whatever unit sizes are compared."""
        if size <= self._largest:
            yield
            return
        saved: dict[int, UntypedStorage] = {}

        def count(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            saved[storage.data_ptr()] = storage
            return tensor

        with saved_tensors_hooks(count, _same):
            yield
        for parameter in self._module.parameters():
            # weights that were gathered from shards for the pass are freed by now, and count nothing
            if not isinstance(parameter, DTensor):
                saved.pop(parameter.untyped_storage().data_ptr(), None)
        self._largest = size
        # a longer row may keep less: one whose forward pass was looked up
        self.num_bytes = max(self.num_bytes, sum(storage.nbytes() for storage in saved.values()))


def _same(tensor: Tensor) -> Tensor:
    return tensor
