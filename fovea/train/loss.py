"""Loss of a micro-batch, and the results of the passes over a minibatch.

The formula comes first, then its terms. A pass returns its measurements on the device; `PassResult.of` reads those of
all micro-batches at once.

Axes: `A` action tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fovea.algorithms.importance import importance_weights
from fovea.algorithms.kl import ESTIMATORS, k3
from fovea.algorithms.masked_pictures import masked_pictures_loss
from fovea.algorithms.policy_loss import HasFormula, cispo_loss, clipped_loss, gspo_loss, sapo_loss
from fovea.algorithms.value_loss import value_loss
from fovea.config.algorithm import Algorithm, CispoLoss, ClippedLoss, GspoLoss, KlInLoss, SapoLoss
from fovea.config.augmentations import Papo
from fovea.models.head_gradients import LossGradients
from fovea.models.token_logprobs import TokenScores
from fovea.train.packing import MicroBatch
from fovea.train.ranks import Ranks
from fovea.utils.host_waits import awaited


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measurements of one micro-batch by one model, still on the device and detached from the graph."""

    micro: MicroBatch
    finite: Tensor
    """True if the loss, and all log-probs that were given, are finite, []."""
    sums: Mapping[str, Tensor]
    """Sums over the actions for the metrics (`train.update_metrics`), [] each."""
    logprobs_A: Tensor | None = None
    """None for a separate value model."""
    values_A: Tensor | None = None


def policy_loss(scores: TokenScores, micro: MicroBatch, algorithm: Algorithm, scale: float) -> tuple[Tensor, Measured]:
    """Return `scale` times the loss of a micro-batch, including that of a value head, and its measurements.

    The losses of all micro-batches add up to the loss of an optimizer step. Actions are weighted by `micro.weights_A`,
    which refer to the whole batch: `scale` is the batch's number of groups divided by the minibatch's.
    """
    loss, sums = _policy_terms(scores, micro, algorithm)
    if scores.values_A is not None:
        value_loss_term, value_sums = _value_terms(scores.values_A, micro, algorithm)
        loss, sums = loss + value_loss_term, sums | value_sums
    # a non-finite log-prob of the engine means that it sampled a token of probability 0: an error even where the loss
    # does not read it
    finite = torch.stack([loss, *(given_A.sum() for given_A in micro.given_logprobs)]).isfinite().all()
    sums |= {"loss": scale * loss, "policy_loss": scale * sums["policy_loss"]}
    sums |= {"actions": torch.full_like(loss, len(micro.weights_A), dtype=torch.float64)}
    return scale * loss, Measured(
        micro=micro,
        finite=finite,
        sums=_detached(sums),
        logprobs_A=scores.logprobs_A.detach(),
        values_A=None if scores.values_A is None else scores.values_A.detach(),
    )


def value_model_loss(
    values_A: Tensor, micro: MicroBatch, algorithm: Algorithm, scale: float
) -> tuple[Tensor, Measured]:
    """Return `scale` times the loss of a separate value model, and its measurements."""
    loss, sums = _value_terms(values_A, micro, algorithm)
    sums |= {"loss": scale * loss}
    return scale * loss, Measured(
        micro=micro, finite=torch.isfinite(loss), sums=_detached(sums), values_A=values_A.detach()
    )


def _policy_terms(scores: TokenScores, micro: MicroBatch, settings: Algorithm) -> tuple[Tensor, dict[str, Tensor]]:
    """The policy loss [], and sums over the actions."""
    logprobs_A = scores.logprobs_A
    # on the first on-policy step the current policy is the old one: detached, so that the ratio is 1 with a gradient
    old_A = logprobs_A.detach() if micro.old_logprobs_A is None else micro.old_logprobs_A
    assert micro.advantages_A is not None, "a policy loss needs advantages (`advantages.with_advantages`)"
    given = (logprobs_A, old_A, micro.advantages_A)
    # the loss of the importance ratio
    match settings.loss:
        case ClippedLoss(clip_low=low, clip_high=high, dual_clip=dual_clip):
            policy = clipped_loss(*given, clip_low=low, clip_high=high, dual_clip=dual_clip)
        case GspoLoss(clip_low=low, clip_high=high, dual_clip=dual_clip):
            policy = gspo_loss(*given, micro.lengths, clip_low=low, clip_high=high, dual_clip=dual_clip)
        case CispoLoss(clip_low=low, clip_high=high):
            policy = cispo_loss(*given, clip_low=low, clip_high=high)
        case SapoLoss(temperature_positive=positive, temperature_negative=negative):
            policy = sapo_loss(*given, temperature_positive=positive, temperature_negative=negative)
        case theirs:
            assert isinstance(theirs, HasFormula), theirs.name
            policy = theirs.policy_loss(*given, micro.lengths)
    loss_A = policy.loss_A
    sums = {
        "entropy": scores.entropies_A.detach().sum(),
        "banned_mass": scores.banned_mass_A.sum(),
        "clip_frac/low": policy.clipped_low_A.sum(),
        "clip_frac/high": policy.clipped_high_A.sum(),
        "ratio_mean": policy.ratio_A.sum(),
        # k3 expects samples from the distribution of its first argument, and the actions are the old policy's samples
        "kl/policy": k3(old_A, logprobs_A.detach()).sum(),
    }
    # weights for the difference between the engine's distribution and the trainer's
    if settings.importance_sampling_fix:
        correction = importance_weights(
            old_A,
            micro.rollout_logprobs_A,
            micro.lengths,
            level=settings.importance_sampling_level,
            cap=settings.importance_sampling_clip,
        )
        loss_A = loss_A * correction.weights_A
        sums["importance/weight"] = correction.weights_A.sum()
        sums["importance/clipped_frac"] = correction.capped_A.sum()
    sums["policy_loss"] = (micro.weights_A * loss_A.detach()).sum()
    # entropy bonus
    if settings.entropy_coef:
        loss_A = loss_A - settings.entropy_coef * scores.entropies_A
    # KL divergence from the reference
    if micro.reference_logprobs_A is not None:
        sums["kl/reference"] = k3(logprobs_A.detach(), micro.reference_logprobs_A).sum()
        if isinstance(settings.kl, KlInLoss):
            estimate = ESTIMATORS[settings.kl.estimator]
            loss_A = loss_A + settings.kl.coef * estimate(logprobs_A, micro.reference_logprobs_A)
    # term for masked pictures
    if micro.masked_logprobs_A is not None:
        sums["picture/dependence"] = k3(logprobs_A, micro.masked_logprobs_A).detach().sum()
        loss_A = loss_A + _masked_pictures_term(logprobs_A, micro.masked_logprobs_A, settings)
    return (micro.weights_A * loss_A).sum(), sums


def _masked_pictures_term(logprobs_A: Tensor, masked_logprobs_A: Tensor, settings: Algorithm) -> Tensor:
    """The loss term for masked pictures; the weights of VPPO are already in the advantages."""
    augmentation = settings.augmentation
    assert augmentation is not None, "log-probs on masked pictures were given, but algorithm.augmentation is not set"
    return masked_pictures_loss(
        logprobs_A,
        masked_logprobs_A,
        coef=augmentation.coef if isinstance(augmentation, Papo) else 0.0,
        entropy_penalty=augmentation.entropy_penalty,
        masked_entropy_penalty=augmentation.masked_entropy_penalty if isinstance(augmentation, Papo) else 0.0,
    )


def _value_terms(values_A: Tensor, micro: MicroBatch, algorithm: Algorithm) -> tuple[Tensor, dict[str, Tensor]]:
    """The value loss [], weighted like the policy loss, and sums over the actions."""
    settings = algorithm.critic
    assert settings is not None, "a value loss needs a value function (algorithm.advantage=gae)"
    assert micro.values_A is not None, "a value loss needs the values from before the update"
    assert micro.returns_A is not None, "a value loss needs the returns"
    terms = value_loss(values_A, micro.values_A, micro.returns_A, clip=settings.value_clip)
    loss = settings.value_coef * (micro.weights_A * terms.loss_A).sum()
    return loss, {"value_loss": terms.loss_A.detach().sum(), "value_clip_frac": terms.clipped_A.sum()}


def _detached(sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: value.detach() for key, value in sums.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class PassResult:
    """Log-probs, metrics and non-finite tasks from the passes over a minibatch."""

    logprobs: Sequence[tuple[MicroBatch, Tensor]]
    """Each micro-batch of this rank with its log-probs [A]."""
    sums: Mapping[str, float]
    """Sums for the metrics (`train.update_metrics`), over all ranks."""
    bad_tasks: Sequence[str]
    """Ids of tasks with a non-finite number, on all ranks."""

    @staticmethod
    def of(measured: Sequence[Measured], ranks: Ranks, reused: Mapping[str, float] | None = None) -> PassResult:
        """Merge these measurements with those of all other ranks, so that every rank makes the same decisions.

        `reused` are further sums of this rank. All numbers are copied to the host at once, since each copy waits for
        the GPU.
        """
        on_device = [number.double() for each in measured for number in (each.finite, *each.sums.values())]
        numbers = iter(awaited(torch.stack(on_device)).tolist() if on_device else ())
        sums, at_fault, beside_them = dict(reused or {}), list[str](), list[str]()
        for each in measured:
            is_finite, values = bool(next(numbers)), {key: next(numbers) for key in each.sums}
            if is_finite:
                _add(sums, values)
            else:
                of_micro, all_of_micro = _tasks_at_fault(each)
                at_fault += of_micro
                beside_them += all_of_micro
        of_ranks = ranks.gather([sums, at_fault, beside_them])
        total: dict[str, float] = {}
        for sums_of_rank, _, _ in of_ranks:
            _add(total, sums_of_rank)
        # if no single number is at fault, all tasks of the micro-batches with a non-finite loss are named
        bad = [task for _, tasks, _ in of_ranks for task in tasks] or [task for *_, tasks in of_ranks for task in tasks]
        return PassResult(
            logprobs=[(each.micro, each.logprobs_A) for each in measured if each.logprobs_A is not None],
            sums=total,
            bad_tasks=list(dict.fromkeys(bad)),
        )

    @property
    def policy_kl(self) -> float:
        """KL divergence from the policy before the update to the current one, per action."""
        return self.sums.get("kl/policy", 0.0) / max(self.sums.get("actions", 0.0), 1.0)


def _tasks_at_fault(measured: Measured) -> tuple[list[str], list[str]]:
    """Ids of the micro-batch's tasks with a non-finite log-prob, value or return, and the ids of all its tasks."""
    micro = measured.micro
    of_network = (measured.logprobs_A, measured.values_A)
    given = (*micro.given_logprobs, micro.values_A, micro.returns_A, *of_network)
    finite_A = torch.stack([value.isfinite() for value in given if value is not None]).all(0)
    tasks = [group.task_id for group in micro.groups for _ in group.samples]
    bad = [not bool(part.all()) for part in awaited(finite_A).cpu().split(micro.lengths)]
    return [task for task, is_bad in zip(tasks, bad, strict=True) if is_bad], tasks


def _add(sums: dict[str, float], more: Mapping[str, float]) -> None:
    for key, value in more.items():
        sums[key] = sums.get(key, 0.0) + value


ROUNDING = 1e-5
"""Relative rounding error of a sum of a few float32 numbers."""


def precomputed_loss_gradients(micro: MicroBatch, algorithm: Algorithm, scale: float) -> LossGradients | None:
    """Derivatives of `scale` times a micro-batch's policy loss with respect to log-probs and entropies [U].

    None if the derivative of an action depends on the log-probs of others, which are not all known before the loss.
    """
    if not can_precompute_gradients(algorithm, on_policy=micro.old_logprobs_A is None):
        return None

    def of_both(logprobs_U: Tensor, entropies_U: Tensor) -> tuple[Tensor, Tensor | None]:
        with torch.enable_grad():
            leaves = logprobs_U.detach().requires_grad_(), entropies_U.detach().requires_grad_()
            scores = TokenScores(logprobs_A=leaves[0], entropies_A=leaves[1], banned_mass_A=torch.zeros_like(leaves[0]))
            loss, _ = _policy_terms(scores.at(micro.row.computed_A), micro, algorithm)
            of_logprobs_U, of_entropies_U = torch.autograd.grad(scale * loss, leaves, allow_unused=True)
        return of_logprobs_U, of_entropies_U

    return LossGradients(of_both, rounding=_rounding(micro, scale))


def _rounding(micro: MicroBatch, scale: float) -> Tensor | float:
    """Rounding error of the derivatives: those of equal completions are summed, and their advantages may cancel."""
    assert micro.advantages_A is not None, "a policy loss needs advantages (`advantages.with_advantages`)"
    weighed_A = micro.weights_A * micro.advantages_A
    # a rank without a group runs a micro-batch without actions
    return ROUNDING * scale * weighed_A.abs().max() if len(weighed_A) else 0.0


def can_precompute_gradients(algorithm: Algorithm, *, on_policy: bool) -> bool:
    """True if the loss of an action depends only on its own log-prob.

    With `on_policy`, the old log-probs are those of the pass itself. Importance ratios are then 1, and weights that are
    made from old log-probs depend on the pass instead of being constants.
    """
    by_token = algorithm.loss.couples_tokens in (("never", "off-policy") if on_policy else ("never",))
    weighed_by_completion = algorithm.importance_sampling_fix and algorithm.importance_sampling_level != "token"
    return by_token and not (weighed_by_completion and on_policy)
