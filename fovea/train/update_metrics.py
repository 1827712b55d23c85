"""Metrics of an update: sums over its passes, engine-trainer mismatch, and activation memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from fovea.algorithms.kl import k3
from fovea.types import Batch, Metrics, SampleGroup

GIB = 2**30

LOSSES = ("loss", "policy_loss")
"""Keys averaged over optimizer steps: their sums are weighted by `Sample.weight` already."""
COUNTS = ("actions", "reused_images")


@dataclass(slots=True)
class UpdateStats:
    """Running statistics of one update."""

    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    norms: list[list[float]] = field(default_factory=list)
    """Gradient norms before clipping by optimizer step: the policy's, then the value function's if there is one."""
    minibatches: int = 1
    """Number of minibatches of an epoch."""
    policy_kl: float = 0.0
    """KL divergence from the policy before the update to the one of the last pass, per action."""
    passes: int = 0
    """Number of passes over a minibatch, including those whose optimizer step was skipped."""
    flops: float = 0.0
    """Model FLOPs of all passes, forward and backward."""
    not_finite: list[str] = field(default_factory=list)
    """Ids of the tasks that caused the last step to be skipped."""

    def add(self, sums: Mapping[str, float], policy_kl: float) -> None:
        """Add the sums of one pass over a minibatch."""
        self.passes += 1
        self.policy_kl = policy_kl
        for key, value in sums.items():
            self.sums[key] += value

    def moved_too_far(self, max_policy_kl: float | None) -> bool:
        """True if the KL divergence of the last pass ends the update (`algorithm.max_policy_kl`).

        Never before the first optimizer step, where it only measures how far the engine's log-probs differ.
        """
        return max_policy_kl is not None and bool(self.norms) and self.policy_kl > max_policy_kl

    def metrics(self) -> Metrics:
        """Metrics of the update: losses are means over optimizer steps, the others over the actions of all passes."""
        actions = max(self.sums["actions"], 1.0)
        means = {key: x / actions for key, x in self.sums.items() if key not in (*LOSSES, *COUNTS)}
        reused = means.pop("reused_actions", 0.0)
        return {
            **{key: self.sums[key] / max(self.passes, 1) for key in LOSSES},
            **means,
            "actions_trained": self.sums["actions"],
            "reused_frac": reused,
            "reused_images": self.sums["reused_images"],
            "update_tflop": self.flops / 1e12,
            "epochs_run": len(self.norms) / max(self.minibatches, 1),
            "kl/policy": self.policy_kl,
            **self._mean_norms(),
        }

    def _mean_norms(self) -> Metrics:
        of_steps = zip(*self.norms, strict=True)
        means = [sum(norms) / len(norms) for norms in of_steps] or [0.0]
        return dict(zip(("grad_norm", "grad_norm/value"), means, strict=False))


def mismatch(groups: Iterable[SampleGroup], old_logprobs: Sequence[NDArray[np.float32]]) -> Metrics:
    """Difference of the engine's log-probs lp and the trainer's lp_old ([T] per sample) over all actions of the groups.

    k1 is the mean of lp - lp_old, `kl` the k3 estimate, `abs` and `max` are the mean and the largest |lp - lp_old|.
    Samples whose completions were sampled from other pictures are left out. Returns {} without groups.
    """
    samples = [sample for group in groups for sample in group.samples]
    if not samples:
        return {}
    assert len(samples) == len(old_logprobs), f"{len(old_logprobs)} arrays of log-probs for {len(samples)} samples"
    old_logprobs = [old_T for sample, old_T in zip(samples, old_logprobs, strict=True) if not sample.is_noisy]
    samples = [sample for sample in samples if not sample.is_noisy]
    is_action_N = np.concatenate([sample.mask_T for sample in samples])
    rollout_A = torch.from_numpy(np.concatenate([sample.rollout_logprobs_T for sample in samples])[is_action_N])
    old_A = torch.from_numpy(np.concatenate(old_logprobs)[is_action_N])
    difference_A = rollout_A - old_A
    return {
        "mismatch/k1": float(difference_A.mean()),
        "mismatch/kl": float(k3(rollout_A, old_A).mean()),
        "mismatch/abs": float(difference_A.abs().mean()),
        "mismatch/max": float(difference_A.abs().max()),
    }


def batch_mismatch(
    batch: Batch, before: Sequence[NDArray[np.float32]], left_out: Sequence[NDArray[np.float32]] | None
) -> Metrics:
    """Engine-trainer mismatch of the trained groups, and of all groups if those left out have log-probs too.

    `before` has the trainer's log-probs [T] of every trained sample before the update, or is empty.
    """
    if len(before) != len(batch.samples):
        return {}
    trained = mismatch(batch.groups, before)
    whole = trained if not batch.left_out else {}
    if left_out:
        whole = mismatch((*batch.groups, *batch.left_out), [*before, *left_out])
    return whole | {key.replace("mismatch/", "mismatch_trained/"): value for key, value in trained.items()}


class ActivationMeter:
    """Bytes of activations that are kept for the backward pass, measured on the largest pass so far.

    Temporaries of the forward and of the backward pass are not counted. With full gradient checkpointing these make up
    most of the peak, and only the inputs of the layers are counted.
    """

    def __init__(self, module: nn.Module, kept_bytes: Callable[[], int] = lambda: 0) -> None:
        """`kept_bytes` counts the bytes that are kept outside of autograd, in all passes so far."""
        self._module = module
        self._kept_bytes = kept_bytes
        self._largest = 0
        self.num_bytes = 0

    @property
    def gib(self) -> float:
        return self.num_bytes / GIB

    @contextmanager
    def __call__(self, size: int) -> Iterator[None]:
        """Measure the forward pass in this context if its `size` (such as its tokens) is the largest so far."""
        # the hooks run for every saved tensor: a smaller pass would pay for them and change nothing
        if size <= self._largest:
            yield
            return
        saved: dict[int, UntypedStorage] = {}

        def count(tensor: Tensor) -> Tensor:
            # by storage, since a view keeps its whole storage alive, and two views share one storage
            storage = tensor.untyped_storage()
            saved[storage.data_ptr()] = storage
            # returning the tensor itself would hold the node that saves it: a failed pass would never be freed
            return tensor.detach()

        before = self._kept_bytes()
        with saved_tensors_hooks(count, _same):
            yield
        kept = self._kept_bytes() - before
        for parameter in self._module.parameters():
            # weights are not activations; those gathered from shards for the pass are freed by now and count 0 bytes
            if not isinstance(parameter, DTensor):
                saved.pop(parameter.untyped_storage().data_ptr(), None)
        self._largest = size
        # a longer row may save less: its linear outputs may have come from the activation tape
        self.num_bytes = max(self.num_bytes, kept + sum(storage.nbytes() for storage in saved.values()))
        # autograd may hold the hook as long as the graph: through it, nothing would be freed during the backward pass
        saved.clear()


def _same(tensor: Tensor) -> Tensor:
    return tensor
