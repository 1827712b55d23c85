"""FLOPs of a step and the seconds that they take at stated efficiencies."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fovea.config.backends import EmbeddedSettings, ServingEngine
from fovea.config.run import Config
from fovea.train.base import Needs
from fovea_tools.plan.activations import Numerics
from fovea_tools.plan.engine import ServingRoom, token_bytes
from fovea_tools.plan.machine import Machine
from fovea_tools.plan.model_sizes import ModelSizes
from fovea_tools.plan.rollout import prompt_demand, running_prompts
from fovea_tools.plan.states import has_own_critic
from fovea_tools.plan.workload import Roles, Workload


def scoring_passes(config: Config) -> int:
    """Passes without gradients before the update: for old log-probs, values, and reference and masked log-probs."""
    needs = Needs.of(config.algorithm, dropout=config.model.has_dropout)
    own_critic = has_own_critic(config)
    # a value head on the policy's trunk gives its values in the pass for old log-probs
    of_policy = needs.old_logprobs or (needs.values and not own_critic)
    return of_policy + own_critic + needs.reference_logprobs + needs.masked_logprobs


def num_networks(config: Config) -> int:
    """Networks that an update goes forward and backward through: the policy, and a separate critic."""
    return 1 + has_own_critic(config)


GIGA, TERA = 1e9, 1e12
UPDATE_MFU = 0.35
"""Share of the peak FLOP rate that forward and backward passes are taken to reach; a plan measures nothing."""
DECODE_BANDWIDTH_FRAC = 0.5
"""Share of the memory bandwidth that decoding is taken to reach."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """Work of one phase of a step."""

    phase: str
    flops: float
    """Model FLOPs on all GPUs together (`models.flops`)."""
    seconds: float | None
    """None for a device whose rates are not known."""


def compute_of(
    config: Config,
    sizes: ModelSizes,
    work: Workload,
    machine: Machine,
    roles: Roles,
    numerics: Numerics,
    room: ServingRoom | None,
) -> tuple[Compute, ...]:
    """FLOPs and seconds of rollout, log-probs and update; `room` is that of the engine."""
    lengths, flops = work.lengths, sizes.family.work
    prompts, completions = config.rollout.prompts_per_step, config.rollout.samples_per_prompt
    one_prompt = flops.prompt(lengths.prompt_tokens, work.images)
    drawn = completions * flops.completion(lengths.completion_tokens, lengths.prompt_tokens)
    rollout = prompts * (one_prompt + drawn)
    # features of a frozen tower are cached, but under Megatron, where each completion has a copy of its prompt too
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
    """Prompts whose completions run at the same time on one engine; None where servers elsewhere generate."""
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
    """Seconds of decoding, which reads all weights and the running completions' cache at every token."""
    bandwidth = machine.gpu.memory_gb_per_second
    if bandwidth is None:
        return None
    lengths, completions = work.lengths, config.rollout.samples_per_prompt
    # half of a completion is there on average; each of them reads its prompt
    cached = running * completions * (lengths.prompt_tokens + lengths.completion_tokens / 2)
    step_bytes = sizes.language_weights * numerics.width + cached * token_bytes(sizes, numerics)
    steps = lengths.completion_tokens * math.ceil(work.rank_prompts / running)
    return steps * step_bytes / (bandwidth * GIGA * DECODE_BANDWIDTH_FRAC)
