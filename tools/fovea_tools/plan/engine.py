"""The engine of a plan: its settings, and the memory of an engine that holds its own weights.

At startup vLLM and SGLang take a share of a GPU (`rollout.engine.gpu_memory_utilization`), load their weights into it,
and make the rest the pool of their key-value cache, regardless of what the requests will need. vLLM's share is of the
whole GPU, SGLang's (`mem_fraction_static`) of the memory that is free at that moment.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from fovea.config.backends import (
    CPU_KV_CACHE_GIB,
    CPU_KV_CACHE_TOKENS,
    EmbeddedSettings,
    ServingEngine,
    SglangSettings,
    VllmSettings,
)
from fovea.config.run import Config
from fovea_gym.errors import ConfigError
from fovea_tools.plan.activations import Bytes, Numerics
from fovea_tools.plan.machine import GIB, Machine
from fovea_tools.plan.megatron import states_of_trainer
from fovea_tools.plan.model_sizes import ModelSizes
from fovea_tools.plan.states import CRITIC, ENGINE, PARAMETERS, REFERENCE
from fovea_tools.plan.workload import Roles

CACHE = "key-value cache"


def embedded_engine(config: Config) -> EmbeddedSettings:
    """Settings of the embedded engine, for a caller that knows that the run uses it."""
    engine = config.rollout.engine
    assert isinstance(engine, EmbeddedSettings), engine.name
    return engine


def batch_tokens(config: Config) -> int:
    """Tokens of the embedded engine's cache, for settings that state them (`with_batch_tokens`)."""
    tokens = embedded_engine(config).max_batch_tokens
    assert tokens is not None
    return tokens


def with_batch_tokens(config: Config, tokens: int) -> Config:
    """A copy of the settings that states the size of the embedded engine's cache."""
    engine = embedded_engine(config).model_copy(update={"max_batch_tokens": tokens})
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"engine": engine})})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingRoom:
    """Memory that an engine with its own weights takes on each of its GPUs while it is awake."""

    weights: int
    """Bytes of the weights on one GPU: all of them, or a part with `tensor_parallel_size`."""
    cache: int
    """Bytes of the pool of the key-value cache."""
    token_bytes: int
    """Bytes of one token's keys and values on one GPU."""
    longest_tokens: int
    """Tokens of the longest conversation, which the pool must hold."""
    sized_to: str
    """The setting that decides the size of the pool, or a note that its default does."""

    @property
    def cache_tokens(self) -> int:
        """Number of tokens that fit into the pool."""
        return self.cache // self.token_bytes

    @property
    def missing_bytes(self) -> int:
        """Bytes that the pool lacks for the longest conversation."""
        return max(0, self.longest_tokens * self.token_bytes - self.cache)

    @property
    def bytes(self) -> Bytes:
        """Bytes of one GPU by part."""
        return Counter({ENGINE: self.weights, CACHE: self.cache})


def serving_room(
    config: Config, sizes: ModelSizes, machine: Machine, roles: Roles, numerics: Numerics
) -> ServingRoom | None:
    """Memory of an engine in the run's processes; None for the embedded engine and for external servers.

    Raises ConfigError, as a run does (`gpus_of_engine`), if several engines would use the same GPU.
    """
    engine = config.rollout.engine
    if not isinstance(engine, ServingEngine):
        return None
    shards = engine.tensor_parallel_size
    if shards > 1 and roles.engines > 1:
        raise ConfigError(
            f"rollout.engine.tensor_parallel_size={shards}, but each of {roles.engines} GPUs runs its own "
            "engine, which would also take the next GPU; set it to 1, or set cluster.placement=disaggregated "
            "cluster.rollout_gpus=1 and leave the GPUs after that one free"
        )
    weights = sizes.parameters * numerics.width // shards
    longest = engine.max_model_len or config.data.max_prompt_tokens + config.rollout.max_new_tokens
    token = token_bytes(sizes, numerics) // min(shards, sizes.decoder.num_kv_heads)
    cache, sized_to = _chosen_cache(engine, token, longest, numerics)
    if cache is None:
        before = Counter[str]() if roles.apart else states_of_trainer(config, sizes, roles, numerics).on_device
        # the optimizer's states do not exist before the first update
        held = sum(before[part] for part in (PARAMETERS, REFERENCE, CRITIC))
        total = int(machine.gpu.memory_gib * GIB)
        free = total - held if isinstance(engine, SglangSettings) else total
        cache = max(0, int(free * engine.gpu_memory_utilization) - weights)
    return ServingRoom(weights=weights, cache=cache, token_bytes=token, longest_tokens=longest, sized_to=sized_to)


def _chosen_cache(engine: ServingEngine, token: int, longest: int, numerics: Numerics) -> tuple[int | None, str]:
    """Bytes of the pool (None if `gpu_memory_utilization` decides), and the name of the setting that decides."""
    if isinstance(engine, VllmSettings):
        gib, key = engine.kv_cache_gib, "rollout.engine.kv_cache_gib"
        if gib is None and not numerics.cuda:
            return int(CPU_KV_CACHE_GIB * GIB), f"the default of {key}"
        if gib is not None:
            return int(gib * GIB), key
    if isinstance(engine, SglangSettings):
        tokens, key = engine.max_total_tokens, "rollout.engine.max_total_tokens"
        if tokens is None and not numerics.cuda:
            return max(CPU_KV_CACHE_TOKENS, 2 * longest) * token, f"the default of {key}"
        if tokens is not None:
            return tokens * token, key
    return None, f"rollout.engine.gpu_memory_utilization={engine.gpu_memory_utilization:g}"


def token_bytes(sizes: ModelSizes, numerics: Numerics) -> int:
    """Bytes of one token's keys and values in all layers."""
    return sizes.decoder.token_bytes(numerics.width)
