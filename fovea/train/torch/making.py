"""The making of a policy, its reference model and its value function, from a network and the settings of a run."""

from __future__ import annotations

import copy

from fovea.config.algorithm import Critic
from fovea.config.run import Config
from fovea.models.activation_tape import Tape
from fovea.models.policy_network import PolicyNetwork
from fovea.models.trainable import freeze_lm_head, trainable_parameters, value_parameters
from fovea.train.adamw import AdamWSettings
from fovea.train.ranks import ALONE, Ranks
from fovea.train.torch.optimizer import Optimizer
from fovea.train.torch.passes import ValueFunction, ValueModel
from fovea.train.torch.policy import TorchPolicy
from fovea.train.torch.sharding import shard


def make_policy(config: Config, vlm: PolicyNetwork, tape: Tape | None = None, ranks: Ranks = ALONE) -> TorchPolicy:
    """Make the policy, sharded in place over `ranks`, with the reference model and value function it needs."""
    critic = config.algorithm.critic
    reference = copy.deepcopy(vlm).requires_grad_(False) if config.copies_reference else None
    value_model = None
    if critic is not None and critic.trunk == "separate":
        value_model = ValueModel(copy.deepcopy(vlm)).to(vlm.device)
        freeze_lm_head(value_model.trunk.network)
    # after the copies and before the optimizers, which keep references to the sharded parameters
    for model in (vlm, reference, value_model):
        if model is not None:
            shard(model, ranks, cpu_offload=config.train.backend.cpu_offload)
    return TorchPolicy(
        vlm,
        train=config.train,
        algorithm=config.algorithm,
        temperature=config.rollout.temperature,
        max_steps=config.max_steps,
        reference=reference,
        value_function=None if critic is None else _make_value_function(config, critic, vlm, value_model),
        tape=tape,
        warmup=config.warmup,
        ranks=ranks,
    )


def _make_value_function(config: Config, critic: Critic, vlm: PolicyNetwork, model: ValueModel | None) -> ValueFunction:
    """The head that `make_vlm` put on the policy, or a separate model."""
    parameters = value_parameters(vlm) if model is None else trainable_parameters(model)
    settings = AdamWSettings.of_critic(critic, config.train, max_steps=config.max_steps)
    optimizer = Optimizer(parameters, settings, on_host=config.train.backend.cpu_offload)
    return ValueFunction(optimizer=optimizer, model=model)
