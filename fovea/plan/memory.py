"""Memory of one process by part, at the peaks of the rollout and of the update."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from fovea.cluster.engine_stream import BUCKET_BYTES
from fovea.config.backends import DEFAULT_BATCH_TOKENS, EmbeddedEngine, MegatronBackend
from fovea.config.run import Config
from fovea.plan import megatron
from fovea.plan.activations import Numerics
from fovea.plan.engine import CACHE, ServingRoom, token_bytes, with_batch_tokens
from fovea.plan.model_sizes import ModelSizes
from fovea.plan.recorded import Recorded, recorded_bytes
from fovea.plan.roles import Roles
from fovea.plan.rollout import pool_bytes, prompt_demand, rollout_peak
from fovea.plan.states import ENGINE
from fovea.plan.trainer import held_states
from fovea.plan.update import update_peak
from fovea.plan.vision import VISION, feature_bytes
from fovea.plan.walk import Bytes
from fovea.plan.workload import Workload
from fovea.rollout.embedded.pool_memory import default_bytes

BUCKET, WHOLE = "weights on their way", "weights made whole"


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseMemory:
    """Bytes by part at the peak of one phase."""

    phase: str
    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def phases_of(
    config: Config,
    sizes: ModelSizes,
    work: Workload,
    roles: Roles,
    numerics: Numerics,
    room: ServingRoom | None,
    usable_bytes: int,
) -> tuple[PhaseMemory, ...]:
    """The memory of a process in each phase of a step, after the first step; `room` is that of its engine.

    Where GPUs train or generate and never both, each phase is that of its own GPUs.
    """
    if not isinstance(config.rollout.engine, EmbeddedEngine):
        return _with_own_weights(config, sizes, work, roles, numerics, room)
    around = _around_pool(config, sizes, work, roles, numerics)
    rollout = around.rollout + rollout_peak(config, sizes, work, numerics, around.recorded)
    pool = 0 if roles.apart else pool_bytes(config, sizes, numerics)
    stays = pool + around.copied <= usable_bytes - around.while_asleep
    staying = Counter({CACHE: pool * stays, ENGINE: around.copied * (stays and pool > 0)})
    phases = _phase("rollout", rollout), _phase("update", around.update + staying)
    return (*phases, _phase("push", around.push + staying)) if around.push else phases


@dataclass(frozen=True, slots=True, kw_only=True)
class AroundPool:
    """What a process with the embedded engine holds, without its key-value cache."""

    rollout: Bytes
    """What is there when a rollout begins."""
    update: Bytes
    """The peak of the update."""
    push: Bytes
    """What is there in a push under Megatron; others send tensors one by one."""
    recorded: Recorded
    copied: int
    """Bytes of the engine's copies of trained weights, which stay during an update if the cache does."""

    @property
    def while_asleep(self) -> int:
        """Most bytes while the engine sleeps."""
        return max(self.update.total(), self.push.total())


def _around_pool(config: Config, sizes: ModelSizes, work: Workload, roles: Roles, numerics: Numerics) -> AroundPool:
    features = Counter({VISION: _cached_features(config, sizes, work, numerics)})
    policy = held_states(config, sizes, roles, numerics).on_device + features
    # the policy's tensors are in other processes, or sharded, so that an engine cannot use them
    width = 0 if roles.shares_tensors else numerics.width
    engine = Counter({ENGINE: sizes.parameters * width})
    # while it sleeps it keeps the weights that no push brings, and copies of the others where they fit; under Megatron
    # it keeps all
    copied = 0 if roles.is_divided else sizes.trainable * width
    asleep = Counter({ENGINE: sizes.parameters * width - copied})
    recorded = (
        Recorded() if roles.apart or roles.is_divided else recorded_bytes(config, sizes, work, roles.trainers, numerics)
    )
    update = policy + _update_peak(config, sizes, work, roles, numerics, recorded)
    if roles.apart:
        return AroundPool(rollout=engine + features, update=update, push=Counter(), recorded=recorded, copied=0)
    rollout = engine + policy
    push = rollout + _made_whole(sizes, numerics) if roles.is_divided else Counter[str]()
    return AroundPool(rollout=rollout, update=asleep + update, push=push, recorded=recorded, copied=copied)


def _made_whole(sizes: ModelSizes, numerics: Numerics) -> Bytes:
    """Tensors of a push that Megatron makes, all before the first is sent."""
    return Counter({WHOLE: sizes.parameters * numerics.width})


def sized_by_memory(
    config: Config, sizes: ModelSizes, work: Workload, roles: Roles, numerics: Numerics, usable_bytes: int
) -> Config:
    """The settings with the tokens that an embedded engine's cache has by default on such a GPU."""
    engine = config.rollout.engine
    if not isinstance(engine, EmbeddedEngine) or engine.max_batch_tokens is not None:
        return config
    if not numerics.cuda:
        return with_batch_tokens(config, DEFAULT_BATCH_TOKENS)
    around = _around_pool(config, sizes, work, roles, numerics)
    beside_update = 0 if roles.apart else usable_bytes - around.while_asleep - around.copied
    free = default_bytes(max(0, usable_bytes - around.rollout.total()), beside_update)
    # an engine refuses a prompt that does not fit: planned for it, the pool is what does not fit the GPU
    return with_batch_tokens(config, max(free // token_bytes(sizes, numerics), prompt_demand(config, work.lengths)))


def _with_own_weights(
    config: Config, sizes: ModelSizes, work: Workload, roles: Roles, numerics: Numerics, room: ServingRoom | None
) -> tuple[PhaseMemory, ...]:
    """The phases with an engine that sleeps during the update, on a GPU, and gets a push of weights after it."""
    features = Counter({VISION: _cached_features(config, sizes, work, numerics)})
    policy = held_states(config, sizes, roles, numerics).on_device + features
    update = policy + _update_peak(config, sizes, work, roles, numerics, Recorded())
    engine: Bytes = Counter() if room is None else room.bytes
    # tensors that have come and are not loaded yet: a bucket, with the tensor that filled it, at most the embedding
    bucket = Counter({BUCKET: BUCKET_BYTES + sizes.vocabulary * sizes.width * numerics.width})
    if roles.apart:
        return _phase("rollout", engine), _phase("update", update), _phase("push", engine + bucket)
    # the pool of the cache comes back when the engine wakes, after the push
    pushed = engine if not numerics.cuda else Counter({ENGINE: engine[ENGINE]})
    asleep: Bytes = Counter() if numerics.cuda else engine
    return (
        _phase("rollout", policy + engine),
        _phase("update", update + asleep),
        _phase("push", policy + pushed + bucket + (_made_whole(sizes, numerics) if roles.is_divided else Counter())),
    )


def _update_peak(
    config: Config, sizes: ModelSizes, work: Workload, roles: Roles, numerics: Numerics, recorded: Recorded
) -> Bytes:
    if roles.is_divided:
        return megatron.update_peak(config, sizes, work, roles, numerics)
    return update_peak(config, sizes, work, roles.trainers, numerics, recorded)


def _phase(name: str, held: Bytes) -> PhaseMemory:
    return PhaseMemory(phase=name, parts={part: size for part, size in held.items() if size})


def _cached_features(config: Config, sizes: ModelSizes, work: Workload, numerics: Numerics) -> int:
    """Features of a frozen tower that stay in memory for the whole run."""
    if config.model.trains_vision or isinstance(config.train.backend, MegatronBackend):
        return 0
    limit = int(config.model.feature_cache_gib * 2**30)
    images = config.plan.distinct_images
    if images is None:
        return limit
    return min(limit, feature_bytes(sizes, images * work.lengths.image_tokens, numerics))
