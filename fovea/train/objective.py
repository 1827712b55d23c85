"""Policy loss and value loss of a micro-batch, and the sums that become metrics.

Axes: `A` action tokens of the micro-batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fovea.algorithms.importance import ImportanceWeights, importance_weights
from fovea.algorithms.kl import ESTIMATORS, k3
from fovea.algorithms.policy_loss import HasFormula, PolicyLoss, cispo_loss, clipped_loss, gspo_loss, sapo_loss
from fovea.algorithms.value_loss import value_loss
from fovea.algorithms.views import views_loss
from fovea.config.algorithm import Algorithm, CispoLoss, ClippedLoss, GspoLoss, KlInLoss, SapoLoss
from fovea.config.views import Papo
from fovea.models.head_gradients import LossGradients
from fovea.models.token_logprobs import TokenScores
from fovea.train.packing import MicroBatch


def policy_terms(scores: TokenScores, micro: MicroBatch, settings: Algorithm) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of a micro-batch, weighted by `micro.weights_A`, and metrics as sums over its actions.

    The losses of all micro-batches add up to the loss of the step.
    """
    # on the first on-policy step the present policy is the old one: detached, so that the ratio is 1 with a gradient
    old_A = scores.logprobs_A.detach() if micro.old_logprobs_A is None else micro.old_logprobs_A
    policy = _policy_loss(scores.logprobs_A, old_A, micro, settings)
    loss_A = policy.loss_A
    sums = {
        "entropy": scores.entropies_A.detach().sum(),
        "banned_mass": scores.banned_mass_A.sum(),
        "clip_frac/low": policy.clipped_low_A.sum(),
        "clip_frac/high": policy.clipped_high_A.sum(),
        "ratio_mean": policy.ratio_A.sum(),
        # k3 is an expectation over samples of its first argument, and the old policy drew the actions
        "kl/policy": k3(old_A, scores.logprobs_A.detach()).sum(),
    }
    if settings.importance_sampling_fix:
        correction = _importance_weights(old_A, micro, settings)
        loss_A = loss_A * correction.weights_A
        sums |= {
            "importance/weight": correction.weights_A.sum(),
            "importance/clipped_frac": correction.capped_A.sum(),
        }
    policy_loss = (micro.weights_A * loss_A.detach()).sum()
    if settings.entropy_coef:
        loss_A = loss_A - settings.entropy_coef * scores.entropies_A
    if micro.reference_logprobs_A is not None:
        sums["kl/reference"] = k3(scores.logprobs_A.detach(), micro.reference_logprobs_A).sum()
        if isinstance(settings.kl, KlInLoss):
            estimate = ESTIMATORS[settings.kl.estimator]
            loss_A = loss_A + settings.kl.coef * estimate(scores.logprobs_A, micro.reference_logprobs_A)
    if micro.masked_logprobs_A is not None:
        sums["picture/dependence"] = k3(scores.logprobs_A, micro.masked_logprobs_A).detach().sum()
        loss_A = loss_A + _of_views(scores.logprobs_A, micro.masked_logprobs_A, settings)
    return (micro.weights_A * loss_A).sum(), sums | {"policy_loss": policy_loss}


def _of_views(logprobs_A: Tensor, masked_logprobs_A: Tensor, settings: Algorithm) -> Tensor:
    """The term of a masked view; vppo's weights are in the advantages already."""
    views = settings.views
    assert views is not None, "log-probs on masked pictures, but no term of them"
    return views_loss(
        logprobs_A,
        masked_logprobs_A,
        coef=views.coef if isinstance(views, Papo) else 0.0,
        entropy_penalty=views.entropy_penalty,
        masked_entropy_penalty=views.masked_entropy_penalty if isinstance(views, Papo) else 0.0,
    )


def value_terms(values_A: Tensor, micro: MicroBatch, algorithm: Algorithm) -> tuple[Tensor, dict[str, Tensor]]:
    """Value loss of a micro-batch, weighted by `micro.weights_A` as the policy loss is, and sums for the metrics."""
    settings = algorithm.critic
    assert settings is not None, "a value loss needs a value function (algorithm.advantage=gae)"
    assert micro.values_A is not None, "it needs the values from before the update"
    assert micro.returns_A is not None, "and the returns"
    terms = value_loss(values_A, micro.values_A, micro.returns_A, clip=settings.value_clip)
    loss = (micro.weights_A * terms.loss_A).sum()
    return settings.value_coef * loss, {
        "value_loss": terms.loss_A.detach().sum(),
        "value_clip_frac": terms.clipped_A.sum(),
    }


def _policy_loss(logprobs_A: Tensor, old_A: Tensor, micro: MicroBatch, settings: Algorithm) -> PolicyLoss:
    assert micro.advantages_A is not None, "a policy loss needs advantages (`advantages.with_advantages`)"
    given = (logprobs_A, old_A, micro.advantages_A)
    match settings.loss:
        case ClippedLoss(clip_low=low, clip_high=high, dual_clip=dual_clip):
            return clipped_loss(*given, clip_low=low, clip_high=high, dual_clip=dual_clip)
        case GspoLoss(clip_low=low, clip_high=high, dual_clip=dual_clip):
            return gspo_loss(*given, micro.lengths, clip_low=low, clip_high=high, dual_clip=dual_clip)
        case CispoLoss(clip_low=low, clip_high=high):
            return cispo_loss(*given, clip_low=low, clip_high=high)
        case SapoLoss(temperature_positive=positive, temperature_negative=negative):
            return sapo_loss(*given, temperature_positive=positive, temperature_negative=negative)
        case theirs:
            assert isinstance(theirs, HasFormula), theirs.name
            return theirs.policy_loss(*given, micro.lengths)


def _importance_weights(old_A: Tensor, micro: MicroBatch, settings: Algorithm) -> ImportanceWeights:
    return importance_weights(
        old_A,
        micro.rollout_logprobs_A,
        micro.lengths,
        level=settings.importance_sampling_level,
        cap=settings.importance_sampling_clip,
    )


ROUNDING = 1e-5
"""Relative, of a sum of some float32 numbers."""


def precomputed_loss_gradients(micro: MicroBatch, algorithm: Algorithm, scale: float) -> LossGradients | None:
    """Derivatives of `scale` times the policy loss of a micro-batch by log-probs and entropies [U].

    None where the derivative of an action depends on the log-probs of others, which are not all known before the loss.
    """
    if not can_precompute_gradients(algorithm, on_policy=micro.old_logprobs_A is None):
        return None

    def of_both(logprobs_U: Tensor, entropies_U: Tensor) -> tuple[Tensor, Tensor | None]:
        with torch.enable_grad():
            leaves = logprobs_U.detach().requires_grad_(), entropies_U.detach().requires_grad_()
            scores = TokenScores(logprobs_A=leaves[0], entropies_A=leaves[1], banned_mass_A=torch.zeros_like(leaves[0]))
            loss, _ = policy_terms(scores.at(micro.row.computed_A), micro, algorithm)
            of_logprobs_U, of_entropies_U = torch.autograd.grad(scale * loss, leaves, allow_unused=True)
        return of_logprobs_U, of_entropies_U

    return LossGradients(of_both, rounding=_rounding(micro, scale))


def _rounding(micro: MicroBatch, scale: float) -> Tensor | float:
    """Derivatives of equal completions are one sum, in which advantages may cancel."""
    assert micro.advantages_A is not None, "a policy loss needs advantages (`advantages.with_advantages`)"
    weighed_A = micro.weights_A * micro.advantages_A
    # a rank without a separate group runs a micro-batch of no actions
    return ROUNDING * scale * weighed_A.abs().max() if len(weighed_A) else 0.0


def can_precompute_gradients(algorithm: Algorithm, *, on_policy: bool) -> bool:
    """True if the loss of an action depends only on its own log-prob.

    `on_policy`: the old log-probs are those of the pass itself. Importance ratios are 1 then, and what is a constant
    otherwise, weights from old log-probs, depends on the pass.
    """
    by_token = algorithm.loss.couples_tokens in (("never", "off-policy") if on_policy else ("never",))
    weighed_by_completion = algorithm.importance_sampling_fix and algorithm.importance_sampling_level != "token"
    return by_token and not (weighed_by_completion and on_policy)
