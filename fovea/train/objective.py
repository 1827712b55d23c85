"""What one micro-batch adds to the loss, and the sums that become metrics.

Axes: `A` action tokens of the micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fovea.algorithms.importance import truncated_weights
from fovea.algorithms.kl import k3
from fovea.algorithms.policy_loss import clipped_loss
from fovea.config import Algorithm
from fovea.models.scores import TokenScores
from fovea.packing import MicroBatch
from fovea.types import Metrics


def objective(scores: TokenScores, micro: MicroBatch, settings: Algorithm) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss summed over actions (the caller divides by the tokens of the whole batch), and sums for the metrics."""
    # an on-policy first update is its own old policy: the ratio is 1 and carries the gradient
    old_A = scores.logprobs_A.detach() if micro.old_logprobs_A is None else micro.old_logprobs_A
    policy = clipped_loss(
        scores.logprobs_A,
        old_A,
        micro.advantages_A,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        dual_clip=settings.dual_clip,
    )
    loss_A, corrections = policy.loss_A, dict[str, Tensor]()
    if settings.importance_sampling_fix:
        weights_A = truncated_weights(old_A, micro.rollout_logprobs_A, cap=settings.importance_sampling_clip)
        loss_A = loss_A * weights_A
        corrections = _corrections(weights_A, settings.importance_sampling_clip)
    loss = loss_A.sum()
    sums = {
        "policy_loss": loss.detach(),
        "entropy": scores.entropies_A.detach().sum(),
        "clipped_low": policy.clipped_low_A.sum(),
        "clipped_high": policy.clipped_high_A.sum(),
        "ratio": policy.ratio_A.sum(),
        **corrections,
        **_mismatch(old_A, micro.rollout_logprobs_A),
    }
    if settings.entropy_coef:
        loss = loss - settings.entropy_coef * scores.entropies_A.sum()
    if micro.reference_logprobs_A is not None:
        kl = k3(scores.logprobs_A, micro.reference_logprobs_A).sum()
        loss = loss + settings.kl_coef * kl
        sums["reference_kl"] = kl.detach()
    return loss, sums | {"loss": loss.detach(), "actions": torch.tensor(float(len(old_A)))}


def _corrections(weights_A: Tensor, cap: float) -> dict[str, Tensor]:
    return {"importance/weight": weights_A.sum(), "importance/clipped_frac": (weights_A >= cap).sum()}


def _mismatch(old_A: Tensor, rollout_A: Tensor) -> dict[str, Tensor]:
    """How far the engine that drew the actions is from the trainer."""
    return {
        "rollout_train_abs": (rollout_A - old_A).abs().sum(),
        "rollout_train_kl": k3(rollout_A, old_A).sum(),
    }


NO_MEANS = ("loss", "actions", "policy_loss", "reused_images")


def as_metrics(sums: Mapping[str, float], normalizer_tokens: int) -> Metrics:
    """The loss as it was minimised; everything else a mean over the actions trained on.

    An update that looked its forward pass up in the rollout's cannot say how far the two are from each other.
    """
    actions = max(sums["actions"], 1.0)
    means = {key: value / actions for key, value in sums.items() if key not in NO_MEANS}
    if means.get("reused_actions"):
        del means["rollout_train_abs"], means["rollout_train_kl"]
    return {
        "loss": sums["loss"] / normalizer_tokens,
        "policy_loss": sums["policy_loss"] / normalizer_tokens,
        "entropy": means.pop("entropy"),
        "ratio_mean": means.pop("ratio"),
        "clip_frac/low": means.pop("clipped_low"),
        "clip_frac/high": means.pop("clipped_high"),
        "actions_trained": sums["actions"],
        "reused_frac": means.pop("reused_actions", 0.0),
        "reused_images": sums.get("reused_images", 0.0),
        **means,
    }
