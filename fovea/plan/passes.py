"""Passes over the batch of a step, besides those of the policy's update (`train.torch.policy.TorchPolicy`)."""

from __future__ import annotations

from fovea.config.run import Config
from fovea.plan.states import has_own_critic
from fovea.train.base import Needs


def scoring_passes(config: Config) -> int:
    """Passes without gradients before the update: for old log-probs, values and reference log-probs."""
    needs = Needs.of(config.algorithm, dropout=config.model.has_dropout)
    own_critic = has_own_critic(config)
    # a value head on the policy's trunk gives its values in the pass for old log-probs
    of_policy = needs.old_logprobs or (needs.values and not own_critic)
    return of_policy + own_critic + needs.reference_logprobs


def num_networks(config: Config) -> int:
    """Networks that an update goes forward and backward through: the policy, and a separate critic."""
    return 1 + has_own_critic(config)
