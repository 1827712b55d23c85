"""Bytes that a GPU receives from others in a step.

Collectives as in ZeRO (Rajbhandari et al., arXiv 1910.02054, section 7): a ring of N ranks moves (N - 1) / N of the
tensors past every rank. Weights are gathered for the forward and again for the backward pass of each micro-batch, in
which gradients are reduced too (decision 054). With replicas of the weights, N are the ranks of one, and the shards of
gradients are summed over the replicas once per optimizer step, by a ring that moves 2 (N - 1) / N of them.

Not counted, since they are far less: a push of weights, prompts, completions and images.
"""

from __future__ import annotations

from fovea.config.run import Config
from fovea_tools.plan.activations import FLOAT, Numerics
from fovea_tools.plan.compute import num_networks, scoring_passes
from fovea_tools.plan.megatron import backend_of, slice_of
from fovea_tools.plan.model_sizes import ModelSizes
from fovea_tools.plan.states import critic_trainable, has_own_critic, shards_of
from fovea_tools.plan.workload import Roles, Workload


def received_bytes(config: Config, sizes: ModelSizes, work: Workload, roles: Roles, numerics: Numerics) -> int:
    """Bytes that a training GPU receives in the collectives of a step; 0 on one GPU."""
    if roles.is_divided:
        return _by_megatron(config, sizes, work, roles, numerics)
    ranks, replicas, epochs = roles.trainers, config.train.backend.replicas, config.algorithm.ppo_epochs
    shards, rows = shards_of(config, ranks), sum(map(len, work.rows))
    past = (shards - 1) / shards
    whole = 0 if sizes.trains_vision else sum(unit.total for unit in sizes.of("vision"))
    passes = 2 * epochs * num_networks(config) + scoring_passes(config)
    weights = rows * passes * past * (sizes.parameters - whole) * numerics.width
    # each replica sums gradients of a micro-batch, and after the last one of an optimizer step shards go over replicas
    gradients = epochs * FLOAT * (sizes.trainable + (critic_trainable(sizes) if has_own_critic(config) else 0))
    over_replicas = 2 * (replicas - 1) / replicas * len(work.rows) * gradients / shards
    return int(weights + past * rows * gradients + over_replicas)


def _by_megatron(config: Config, sizes: ModelSizes, work: Workload, roles: Roles, numerics: Numerics) -> int:
    backend, mine, epochs = backend_of(config), slice_of(config, sizes, roles), config.algorithm.ppo_epochs
    tensor, experts, shares = backend.tensor_parallel_size, backend.expert_parallel_size, roles.shares
    stream = sum(row.tokens for rows in work.rows for row in rows) * sizes.width * numerics.width
    layers = sizes.decoder.num_layers // roles.stages
    again = config.train.gradient_checkpointing == "full"
    passes = epochs * (2 + again) + scoring_passes(config)
    sums = layers * passes * 2 * 2 * (tensor - 1) / tensor * stream
    # tokens go to their experts and back
    to_experts = layers * passes * 2 * sizes.decoder.experts_per_token * (experts - 1) / experts * stream / tensor
    # layers that run again have their inputs
    between_stages = (2 * epochs + scoring_passes(config)) * stream * (roles.stages > 1)
    # gradients are reduce-scattered, and trained weights all-gathered
    trained = epochs * len(work.rows) * (shares - 1) / shares * mine.trainable * (FLOAT + numerics.width)
    return int(sums + to_experts + between_stages + trained)
