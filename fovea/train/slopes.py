"""Slopes of a policy loss, for gradients that are made before the loss is (`models.head_gradients`).

Axes: `U` actions of the unequal completions of a micro-batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fovea.config.run import Algorithm
from fovea.models.head_gradients import Slopes
from fovea.models.token_logprobs import TokenScores
from fovea.train.objective import policy_terms
from fovea.train.packing import MicroBatch

ROUNDING = 1e-5
"""Relative, of a sum of some float32 numbers."""


def known_slopes(micro: MicroBatch, algorithm: Algorithm, scale: float) -> Slopes | None:
    """Derivatives of `scale` times the policy loss of a micro-batch by log-probs and entropies [U].

    None where the slope of an action depends on the log-probs of others, which are not all known before the loss.
    """
    if not slopes_are_known(algorithm, on_policy=micro.old_logprobs_A is None):
        return None

    def of_both(logprobs_U: Tensor, entropies_U: Tensor) -> tuple[Tensor, Tensor | None]:
        with torch.enable_grad():
            leaves = logprobs_U.detach().requires_grad_(), entropies_U.detach().requires_grad_()
            scores = TokenScores(logprobs_A=leaves[0], entropies_A=leaves[1], banned_mass_A=torch.zeros_like(leaves[0]))
            loss, _ = policy_terms(scores.at(micro.row.computed_A), micro, algorithm)
            of_logprobs_U, of_entropies_U = torch.autograd.grad(scale * loss, leaves, allow_unused=True)
        return of_logprobs_U, of_entropies_U

    return Slopes(of_both, rounding=_rounding(micro, scale))


def _rounding(micro: MicroBatch, scale: float) -> Tensor | float:
    """Slopes of equal completions are one sum, in which advantages may cancel."""
    assert micro.advantages_A is not None, "a policy loss needs advantages (`advantages.with_advantages`)"
    weighed_A = micro.weights_A * micro.advantages_A
    # a rank without a group of its own runs a micro-batch of no actions
    return ROUNDING * scale * weighed_A.abs().max() if len(weighed_A) else 0.0


def slopes_are_known(algorithm: Algorithm, *, on_policy: bool) -> bool:
    """Whether the slope of an action depends on its own log-prob alone.

    `on_policy`: the old log-probs are those of the pass itself. Importance ratios are 1 then, and what is a constant
    otherwise, weights from old log-probs, depends on the pass.
    """
    by_token = algorithm.loss.couples_tokens in (("never", "off-policy") if on_policy else ("never",))
    weighed_by_completion = algorithm.importance_sampling_fix and algorithm.importance_sampling_level != "token"
    return by_token and not (weighed_by_completion and on_policy)
