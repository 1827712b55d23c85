"""Bytes that a step moves between processes.

Collectives as in ZeRO (Rajbhandari et al., arXiv 1910.02054, section 7): a ring of N ranks moves (N - 1) / N of the
tensors past every rank. Weights are gathered for the forward and again for the backward pass of each micro-batch, in
which gradients are reduced too (decision 054). With replicas of the weights, N are the ranks of one, and the shards of
gradients are summed over the replicas once per optimizer step, by a ring that moves 2 (N - 1) / N of them. A push
brings what training changes. The driver sends a prompt to the engine that completes it, and the tokens of the whole
batch to every learner, twice; an image goes once to each process that needs it, as float32 pixels (decision 014).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from fovea.config.run import Config
from fovea.train.base import Needs
from fovea_tools.plan.activations import FLOAT, Numerics
from fovea_tools.plan.compute import num_networks, scoring_passes
from fovea_tools.plan.megatron import backend_of, slice_of
from fovea_tools.plan.model_sizes import ModelSizes
from fovea_tools.plan.states import critic_trainable, has_own_critic, shards_of
from fovea_tools.plan.workload import Roles, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """Bytes that a step moves for one purpose."""

    what: str
    num_bytes: int
    """Bytes per step: received by each GPU, or sent by the driver to all processes."""
    by_driver: bool = False


def moved_by_megatron(
    config: Config, sizes: ModelSizes, work: Workload, roles: Roles, numerics: Numerics
) -> Iterator[Moved]:
    """Received by a GPU of this stage."""
    backend, mine, epochs = backend_of(config), slice_of(config, sizes, roles), config.algorithm.ppo_epochs
    tensor, experts, shares = backend.tensor_parallel_size, backend.expert_parallel_size, roles.shares
    stream = sum(row.tokens for rows in work.rows for row in rows) * sizes.width * numerics.width
    layers = sizes.decoder.num_layers // roles.stages
    again = config.train.gradient_checkpointing == "full"
    forward = epochs * (1 + again) + scoring_passes(config)
    if tensor > 1:
        of_layer = 2 * 2 * (tensor - 1) / tensor * stream
        yield Moved(what="sums over split layers", num_bytes=int(layers * (forward + epochs) * of_layer))
    if experts > 1:
        # there and back, each to its experts
        travels = 2 * sizes.decoder.experts_per_token * (experts - 1) / experts * stream / tensor
        yield Moved(what="tokens to experts", num_bytes=int(layers * (forward + epochs) * travels))
    if roles.stages > 1:
        # layers that run again have their inputs
        between = (2 * epochs + scoring_passes(config)) * stream
        yield Moved(what="activations between stages", num_bytes=int(between))
    past, steps = (shares - 1) / shares, epochs * len(work.rows)
    if shares > 1:
        trained = steps * past * mine.trainable
        yield Moved(what="reduce-scatter of gradients", num_bytes=int(trained * FLOAT))
        yield Moved(what="all-gather of weights", num_bytes=int(trained * numerics.width))
    missing = sizes.parameters - mine.total
    yield Moved(what="weights made whole for a push", num_bytes=missing * numerics.width)


ID = np.dtype(np.int64).itemsize
COMPLETION_TOKEN = ID + np.dtype(np.bool_).itemsize + FLOAT
"""Bytes of a token of a completion as it was sampled: its id, its place in the mask, its log-prob."""
GROUP, SAMPLE, ARRAY = 300, 50, 24
"""Bytes that a message has of a group, a sample and an array of one besides their values, measured once."""


def traffic_of(
    config: Config, sizes: ModelSizes, work: Workload, roles: Roles, numerics: Numerics
) -> tuple[Moved, ...]:
    """The traffic of a step; nothing on one process."""
    if roles.shares_tensors:
        return ()
    by_driver = (
        Moved(what="images, from the driver", num_bytes=_image_bytes(config, sizes, work, roles), by_driver=True),
        Moved(what="tokens, from the driver", num_bytes=_token_bytes(config, work, roles), by_driver=True),
    )
    if roles.is_divided:
        return *moved_by_megatron(config, sizes, work, roles, numerics), *by_driver
    return *_moved_by_fsdp(config, sizes, work, roles, numerics), *by_driver


def _moved_by_fsdp(
    config: Config, sizes: ModelSizes, work: Workload, roles: Roles, numerics: Numerics
) -> tuple[Moved, ...]:
    """Collectives of shards and replicas, and a push."""
    ranks = roles.trainers
    shards, replicas = shards_of(config, ranks), config.train.backend.replicas
    past = (shards - 1) / shards
    whole = 0 if sizes.trains_vision else sum(unit.total for unit in sizes.of("vision"))
    weights = past * (sizes.parameters - whole) * numerics.width
    rows = sum(map(len, work.rows))
    epochs = config.algorithm.ppo_epochs
    passes = 2 * epochs * num_networks(config) + scoring_passes(config)
    trained = sizes.trainable + (critic_trainable(sizes) if has_own_critic(config) else 0)
    pushed = sizes.trainable * numerics.width
    # each replica sums those of a micro-batch, and after the last one of an optimizer step shards go over replicas
    gradients = epochs * FLOAT * trained
    over_replicas = 2 * (replicas - 1) / replicas * len(work.rows) * gradients / shards
    return (
        Moved(what="all-gather of weights", num_bytes=int(rows * passes * weights)),
        Moved(what="reduce-scatter of gradients", num_bytes=int(past * rows * gradients)),
        *([Moved(what="all-reduce over replicas", num_bytes=int(over_replicas))] if replicas > 1 else []),
        # an engine that shares its process with a shard has that shard already
        Moved(what="weights to the engine", num_bytes=pushed if config.cluster.rollout_gpus else int(past * pushed)),
    )


def _needs(config: Config) -> Needs:
    return Needs.of(config.algorithm, dropout=config.model.has_dropout)


def _remote_learners(config: Config, roles: Roles) -> int:
    """Learners in other processes than the driver's, which under torchrun is the first of them."""
    return roles.trainers - (not config.cluster.num_ray_workers)


def _image_bytes(config: Config, sizes: ModelSizes, work: Workload, roles: Roles) -> int:
    """Every image goes to one engine and to the learners that have rows of it, and to a process that is both once."""
    vision, images = sizes.vision, config.rollout.prompts_per_step * work.lengths.images
    patch_bytes = int(vision.in_channels * vision.temporal_patch_size * vision.patch_size**2) * FLOAT
    learners, has_row = _remote_learners(config, roles), _share_of_learner(config, sizes, roles)
    engines = roles.engines - (not config.cluster.num_ray_workers and not roles.apart)
    both = 0 if roles.apart else learners
    copies = learners * has_row + Fraction(engines, roles.engines) - both * has_row / roles.engines
    # where the tower trains, each learner also has the smallest image of a minibatch, for rows without one
    dummies = learners * (1 - has_row) * config.algorithm.minibatches if sizes.trains_vision and images else 0
    return int((copies * images + dummies) * work.lengths.patches * patch_bytes)


def _share_of_learner(config: Config, sizes: ModelSizes, roles: Roles) -> Fraction:
    """Share of a step's images in the rows of one learner, where each assignment of groups is like a draw."""
    algorithm, needs = config.algorithm, _needs(config)
    scores = needs.old_logprobs or needs.reference_logprobs or needs.values
    # with one minibatch all passes have the rows of the first
    assignments = algorithm.ppo_epochs + scores if algorithm.minibatches > 1 else 1
    # a reference beside a trained tower has other costs: its own encodes nothing that it has cached
    assignments += config.copies_reference and sizes.trains_vision
    return 1 - (1 - Fraction(1, roles.shares)) ** assignments


def _token_bytes(config: Config, work: Workload, roles: Roles) -> int:
    """Requests to the engines, and to each learner the batch for what needs a forward pass first, then for the update.

    The request of a prompt counts as a group without samples.
    """
    lengths, prompts, needs = work.lengths, config.rollout.prompts_per_step, _needs(config)
    # the ids of a prompt go in both forms, with a token per visual token and with one per image
    unexpanded = lengths.prompt_tokens - lengths.images * (lengths.image_tokens - 1)
    group = GROUP + ID * (lengths.prompt_tokens + unexpanded)
    sampled = SAMPLE + 3 * ARRAY + COMPLETION_TOKEN * lengths.completion_tokens
    # advantages, and returns beside values
    added = 1 + needs.old_logprobs + needs.reference_logprobs + needs.masked_logprobs + 2 * needs.values
    samples = 2 * sampled + added * (ARRAY + FLOAT * lengths.completion_tokens)
    batches = 2 * group + config.rollout.samples_per_prompt * samples
    return prompts * (group + _remote_learners(config, roles) * batches)
