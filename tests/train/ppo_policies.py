"""Policies with a value function, and batches scored for them."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import torch

from fovea.advantages import with_advantages
from fovea.config.algorithm import Algorithm, Critic, Gae
from fovea.models.heads import ValueHead
from fovea.models.modules import config_of
from fovea.models.tiny import TinyParts
from fovea.models.trainable import trainable_parameters, value_parameters
from fovea.models.vlm import VLM
from fovea.samples import replace_samples, with_old_logprobs, with_values
from fovea.train.adamw import AdamWSettings
from fovea.train.torch.optimizer import Optimizer
from fovea.train.torch.passes import ValueFunction, ValueModel
from fovea.train.torch.policy import TorchPolicy
from fovea.types import Batch
from tests.policies import policy_on, train_settings

GAE = Gae(gamma=0.99, gae_lambda=0.95, critic=Critic(value_clip=None))
PPO = Algorithm(name="ppo", ppo_epochs=1, entropy_coef=0.0, advantage=GAE)


def ppo_policy(
    parts: TinyParts, *, separate: bool = False, detach_trunk: bool = False, algorithm: Algorithm = PPO, **train: object
) -> TorchPolicy:
    """With a value head that is not 0, so that values differ."""
    torch.manual_seed(7)
    settings = train_settings(**{"lr_warmup_steps": 0, **train})
    width = config_of(parts.network).text_config.hidden_size
    head = None if separate else ValueHead(width, detach_trunk=detach_trunk)
    vlm = VLM(parts.network, parts.processor.banned_ids, value_head=head)
    model = ValueModel(copy.deepcopy(vlm)) if separate else None
    linear = (model.head if model is not None else vlm.value_head).linear  # type: ignore[union-attr]
    torch.nn.init.normal_(linear.weight, std=0.1)
    values = value_parameters(vlm) if model is None else trainable_parameters(model)
    critic = AdamWSettings.of_run(settings, peak_rate=1e-2, max_steps=10)
    return policy_on(
        vlm, settings, algorithm, value_function=ValueFunction(optimizer=Optimizer(values, critic), model=model)
    )


def with_rewards(batch: Batch) -> Batch:
    rewards = iter([1.0, 0.0, 0.5, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0])
    return replace_samples(batch, lambda sample: replace(sample, reward=next(rewards)))


def logprobs_and_values(policy: TorchPolicy, batch: Batch) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Whichever trunk the value function has."""
    if policy.value_function is not None and policy.value_function.model is not None:
        return policy.logprobs(batch), policy.values(batch)
    return policy.logprobs_and_values(batch)


def scored(policy: TorchPolicy, batch: Batch, algorithm: Algorithm = PPO) -> Batch:
    logprobs, values = logprobs_and_values(policy, batch)
    batch = with_values(with_old_logprobs(with_rewards(batch), logprobs), values)
    return with_advantages(batch, algorithm, 0.0)[0]
