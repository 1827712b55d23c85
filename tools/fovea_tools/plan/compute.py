"""FLOPs of a step, their seconds at assumed efficiencies, and the bytes that a GPU receives from the others.

Collectives are counted as in ZeRO (Rajbhandari et al., arXiv 1910.02054, section 7): a ring of N ranks moves (N - 1) /
N of the tensors past every rank. Each micro-batch gathers weights for its forward pass and again for its backward pass,
which also reduces gradients (decision 054). With R replicas of the weights, N is the number of ranks of one replica,
and once per optimizer step the shards of gradients are summed over the replicas, by a ring that moves 2 (R - 1) / R of
them.

The traffic of weight syncs, prompts, completions and images is far smaller, and not counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fovea.config.backends import EmbeddedSettings, ServingEngine
from fovea.config.run import Config
from fovea.train.base import Needs
from fovea_tools.plan.activations import FLOAT, Numerics
from fovea_tools.plan.engine import ServingRoom, token_bytes
from fovea_tools.plan.machine import Machine
from fovea_tools.plan.megatron import backend_of, slice_of
from fovea_tools.plan.model_sizes import ModelSizes
from fovea_tools.plan.rollout import prompt_demand, running_prompts
from fovea_tools.plan.states import critic_trainable, has_own_critic, shards_of
from fovea_tools.plan.workload import Roles, Workload


def scoring_passes(config: Config) -> int:
    """Number of passes without gradients before the update: old log-probs, values, reference and masked log-probs."""
    needs = Needs.of(config.algorithm, dropout=config.model.has_dropout)
    own_critic = has_own_critic(config)
    # a value head on the policy's trunk computes its values in the pass for old log-probs
    of_policy = needs.old_logprobs or (needs.values and not own_critic)
    return of_policy + own_critic + needs.reference_logprobs + needs.masked_logprobs


def num_networks(config: Config) -> int:
    """Number of networks that an update trains: the policy, and a separate critic."""
    return 1 + has_own_critic(config)


GIGA, TERA = 1e9, 1e12
UPDATE_MFU = 0.35
"""Share of the peak FLOP rate that forward and backward passes are assumed to reach; a plan measures nothing."""
DECODE_BANDWIDTH_FRAC = 0.5
"""Share of the memory bandwidth that decoding is assumed to reach."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """Work of one phase of a step."""

    phase: str
    flops: float
    """Model FLOPs on all GPUs together (`models.flops`)."""
    seconds: float | None
    """Estimated seconds; None for a device of unknown speed."""


def compute_of(
    config: Config,
    sizes: ModelSizes,
    work: Workload,
    machine: Machine,
    roles: Roles,
    numerics: Numerics,
    room: ServingRoom | None,
) -> tuple[Compute, ...]:
    """FLOPs and seconds of rollout, log-probs and update; `room` describes a serving engine."""
    lengths, flops = work.lengths, sizes.family.work
    prompts, completions = config.rollout.prompts_per_step, config.rollout.samples_per_prompt
    one_prompt = flops.prompt(lengths.prompt_tokens, work.images)
    drawn = completions * flops.completion(lengths.completion_tokens, lengths.prompt_tokens)
    rollout = prompts * (one_prompt + drawn)
    # features of a frozen tower are cached, except under Megatron, where each completion also has its own copy of the
    # prompt
    cached = not (sizes.trains_vision or roles.is_divided)
    scored_prompt = flops.prompt(lengths.prompt_tokens, ()) if cached else one_prompt
    copies = completions if roles.is_divided else 1
    scored = prompts * (copies * scored_prompt + drawn) * scoring_passes(config)
    update = work.update_flops * num_networks(config)
    running = decoding_prompts(config, work, numerics, room)
    decode = None if running is None else _decode_seconds(config, sizes, work, machine, numerics, running)
    prefill = _seconds(prompts * one_prompt, machine, roles.engines)
    seconds = None if decode is None or prefill is None else decode + prefill
    found = [Compute(phase="rollout", flops=rollout, seconds=seconds)]
    for phase, work_flops in (("logprobs", scored), ("update", update)):
        if work_flops or phase == "update":
            found.append(Compute(phase=phase, flops=work_flops, seconds=_seconds(work_flops, machine, roles.trainers)))
    return tuple(found)


def _seconds(flops: float, machine: Machine, gpus: int) -> float | None:
    peak = machine.gpu.peak_tflops
    return None if peak is None else flops / (gpus * peak * TERA * UPDATE_MFU)


def decoding_prompts(config: Config, work: Workload, numerics: Numerics, room: ServingRoom | None) -> int | None:
    """Prompts whose completions run at the same time on one engine; None if external servers generate."""
    engine = config.rollout.engine
    if isinstance(engine, EmbeddedSettings):
        return running_prompts(config, work, numerics)
    if room is None or not isinstance(engine, ServingEngine):
        return None
    by_cache = room.cache_tokens // prompt_demand(config, work.lengths)
    return max(1, min(work.rank_prompts, by_cache, engine.max_num_seqs // config.rollout.samples_per_prompt))


def _decode_seconds(
    config: Config, sizes: ModelSizes, work: Workload, machine: Machine, numerics: Numerics, running: int
) -> float | None:
    """Seconds of decoding, which reads all weights and the running completions' cache for every token."""
    bandwidth = machine.gpu.memory_gb_per_second
    if bandwidth is None:
        return None
    lengths, completions = work.lengths, config.rollout.samples_per_prompt
    # on average half of a completion is in the cache, and each completion reads its prompt's keys and values
    cached = running * completions * (lengths.prompt_tokens + lengths.completion_tokens / 2)
    step_bytes = sizes.language_weights * numerics.width + cached * token_bytes(sizes, numerics)
    steps = lengths.completion_tokens * math.ceil(work.rank_prompts / running)
    return steps * step_bytes / (bandwidth * GIGA * DECODE_BANDWIDTH_FRAC)


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
    # each replica reduces the gradients of every micro-batch; after the last one of an optimizer step, shards are
    # summed over the replicas
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
    # tokens are sent to their experts and back
    to_experts = layers * passes * 2 * sizes.decoder.experts_per_token * (experts - 1) / experts * stream / tensor
    # recomputed layers already have their inputs
    between_stages = (2 * epochs + scoring_passes(config)) * stream * (roles.stages > 1)
    # gradients are reduce-scattered, and trained weights all-gathered
    trained = epochs * len(work.rows) * (shares - 1) / shares * mine.trainable * (FLOAT + numerics.width)
    return int(sums + to_experts + between_stages + trained)
