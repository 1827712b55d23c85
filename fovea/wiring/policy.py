"""Builders of the policy, its value function and the warm-up."""

from __future__ import annotations

import copy

from fovea.config.algorithm import Critic
from fovea.config.run import Config
from fovea.data.order import Order
from fovea.data.prompt_source import PromptSource
from fovea.models.activation_tape import Tape
from fovea.models.policy_network import PolicyNetwork
from fovea.models.render import Renderer
from fovea.models.trainable import freeze_lm_head, trainable_parameters, value_parameters
from fovea.run.warmup import WarmupStage
from fovea.train.adamw import AdamWSettings
from fovea.train.ranks import ALONE, Ranks
from fovea.train.torch.optimizer import Optimizer
from fovea.train.torch.passes import ValueFunction, ValueModel
from fovea.train.torch.policy import TorchPolicy
from fovea.train.torch.sharding import shard
from fovea_gym.environments.base import Environment
from fovea_gym.environments.mixture import with_shares
from fovea_gym.errors import ConfigError
from fovea_gym.rows.tasks import kinds_of


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


def make_warmup(
    config: Config, environment: Environment, train: PromptSource, renderer: Renderer
) -> WarmupStage | None:
    """Make the warm-up; None without one."""
    settings = config.warmup
    if settings is None:
        return None
    unknown = set(settings.stop_kind_accuracy) - set(kinds_of(environment.tasks("dev")))
    if unknown:
        raise ConfigError(
            f"warmup.stop_kind_accuracy: no dev row is of kind {', '.join(sorted(unknown))}, so that the warm-up could "
            f"never stop; the kinds are {', '.join(sorted(set(kinds_of(environment.tasks('dev')))))}"
        )
    return WarmupStage(
        settings=settings,
        # a separate data order, so that the rows of RL do not depend on how long the warm-up took
        order=Order(
            kinds_of(train.tasks),
            weights=with_shares(settings.kind_weights, train.tasks),
            seed=config.seed + 1,
            setting="warmup.kind_weights",
        ),
        source=train,
        environment=environment,
        answer_ids=renderer.target,
    )
