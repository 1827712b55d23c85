"""Memory of one process by part, at the peaks of the rollout and of the update."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from fovea.config.backends import DEFAULT_BATCH_TOKENS, EmbeddedSettings, MegatronBackend
from fovea.config.run import Config
from fovea.models.vision.tower_inputs import PASS_PATCHES
from fovea.rollout.embedded.memory import POOL_FRAC, default_bytes
from fovea.weights.sync import BUCKET_BYTES
from fovea_tools.plan import megatron, states
from fovea_tools.plan.activations import (
    FLOAT,
    Bytes,
    Numerics,
    PassStage,
    decoder_stages,
    embedding_stage,
    head_stage,
    peak_of,
)
from fovea_tools.plan.engine import CACHE, ServingRoom, token_bytes, with_batch_tokens
from fovea_tools.plan.model_sizes import ModelSizes
from fovea_tools.plan.rollout import Recorded, pool_bytes, prompt_demand, recorded_bytes, rollout_peak
from fovea_tools.plan.states import CRITIC, ENGINE, GATHERED, GRADIENTS
from fovea_tools.plan.vision import VISION, feature_bytes, tower_stages
from fovea_tools.plan.workload import Roles, RowShape, Workload


def update_peak(
    config: Config, sizes: ModelSizes, work: Workload, ranks: int, numerics: Numerics, recorded: Recorded
) -> Bytes:
    """Bytes by part at the peak of an update, without those that are held in all phases."""
    # all ranks have the same number of rows; the second row's pass finds the gradients of the first
    gradients_held = work.rows_per_minibatch > 1
    held = _held_gradients(config, sizes, ranks, numerics)

    def row_peak(row: RowShape, of: str) -> Bytes:
        # a separate critic encodes images with its own tower and computes no logits
        encodes = of == CRITIC or not recorded.vision_graph
        stages = _on_ranks(row_stages(config, sizes, row, numerics, encodes=encodes), config, ranks, numerics)
        return peak_of(stages[:-1] if of == CRITIC else stages, gradients_part=of, gradients_held=gradients_held)

    peaks = [row_peak(row, GRADIENTS) for row in work.distinct_rows]
    if states.has_own_critic(config):
        if gradients_held:
            peaks = [Counter({CRITIC: held[CRITIC]}) + peak for peak in peaks]
        # the critic's backward pass runs after the policy's, whose gradients stay in memory
        peaks += [Counter({GRADIENTS: held[GRADIENTS]}) + row_peak(row, CRITIC) for row in work.distinct_rows]
    if recorded.vision_graph:
        peaks.append(_graph_peak(config, sizes, work, numerics))
    peak: Bytes = max(peaks, key=lambda peak: peak.total()) + recorded.bytes
    peak[GATHERED] += states.gathered_bytes(sizes, ranks, numerics)
    # the optimizer's step needs only gradients; they exceed the peak if most did not exist yet at that moment
    return max(peak, held, key=lambda moment: moment.total())


def _held_gradients(config: Config, sizes: ModelSizes, ranks: int, numerics: Numerics) -> Bytes:
    """Bytes of the gradients that are held between micro-batches and before the optimizer's step."""
    critic = states.critic_trainable(sizes) if states.has_own_critic(config) else 0
    numbers = {GRADIENTS: sizes.trainable, CRITIC: critic}
    return Counter({part: states.gradient_bytes(config, count, ranks, numerics) for part, count in numbers.items()})


def _graph_peak(config: Config, sizes: ModelSizes, work: Workload, numerics: Numerics) -> Bytes:
    """Bytes of the backward pass through the recorded vision graph, which runs after those of all rows."""
    patches = work.rank_prompts * work.lengths.images * work.lengths.patches
    stages = tower_stages(config.train.gradient_checkpointing, sizes, min(patches, PASS_PATCHES), numerics)
    return Counter({VISION: max(stage.backward for stage in stages), GRADIENTS: FLOAT * sizes.trainable})


def _on_ranks(stages: Sequence[PassStage], config: Config, ranks: int, numerics: Numerics) -> list[PassStage]:
    """The stages of a packed row on several ranks; the first and the last stage are FSDP2's root.

    Gradients are whole, in the weights' dtype, until they are reduce-scattered: those of a layer or block after its
    backward pass, those of the root after the whole backward pass.
    """
    if ranks == 1:
        return list(stages)
    last = len(stages) - 1
    return [_on_rank(x, config, ranks, numerics, in_root=n in (0, last)) for n, x in enumerate(stages)]


def _on_rank(stage: PassStage, config: Config, ranks: int, numerics: Numerics, *, in_root: bool) -> PassStage:
    trainable = stage.gradient // FLOAT
    whole = trainable * numerics.width
    return replace(
        stage,
        gradient=states.gradient_bytes(config, trainable, ranks, numerics),
        backward=stage.backward + (0 if in_root else whole),
        pending=stage.pending * numerics.width // FLOAT + (whole if in_root else 0),
    )


def row_stages(
    config: Config, sizes: ModelSizes, row: RowShape, numerics: Numerics, *, encodes: bool = True
) -> list[PassStage]:
    """The stages of a packed row in the order of its forward pass; `encodes` adds those of a trained vision tower."""
    tower = tower_stages(config.train.gradient_checkpointing, sizes, row.patches, numerics) if encodes else []
    features = PassStage(part=VISION, saved=0, forward=row.visual_tokens * sizes.width * numerics.width)
    return [
        embedding_stage(sizes, row, numerics),
        *tower,
        features,
        *decoder_stages(config, sizes, row, numerics),
        head_stage(config, sizes, row, numerics),
    ]


SizedTo: TypeAlias = str
"""Description of what decides the size of a key-value cache."""
LEFT_BY_UPDATE = "all memory that the update leaves free, so it can stay allocated"
FREE_IN_ROLLOUT = f"{POOL_FRAC:.0%} of the memory that is free in the rollout"
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
    """Memory of a process in each phase of a step after the first; `room` describes a serving engine.

    With separate GPUs for training and generation, each phase describes its own GPUs.
    """
    if not isinstance(config.rollout.engine, EmbeddedSettings):
        return _with_own_weights(config, sizes, work, roles, numerics, room)
    around = _around_pool(config, sizes, work, roles, numerics)
    rollout = around.rollout + rollout_peak(config, sizes, work, numerics, around.recorded)
    pool = 0 if roles.apart else pool_bytes(config, sizes, numerics)
    stays = pool + around.copied <= usable_bytes - around.while_asleep
    staying = Counter({CACHE: pool * stays, ENGINE: around.copied * (stays and pool > 0)})
    phases = _phase("rollout", rollout), _phase("update", around.update + staying)
    return (*phases, _phase("weight_sync", around.sync + staying)) if around.sync else phases


@dataclass(frozen=True, slots=True, kw_only=True)
class AroundPool:
    """Memory of a process with the embedded engine, without the key-value cache."""

    rollout: Bytes
    """Memory in use when a rollout begins."""
    update: Bytes
    """Memory at the peak of the update."""
    sync: Bytes
    """Memory in use during a weight sync under Megatron; other backends send tensors one by one."""
    recorded: Recorded
    copied: int
    """Bytes of the engine's copies of trained weights, which stay during an update if the cache does."""

    @property
    def while_asleep(self) -> int:
        """Peak bytes while the engine sleeps."""
        return max(self.update.total(), self.sync.total())


def _around_pool(config: Config, sizes: ModelSizes, work: Workload, roles: Roles, numerics: Numerics) -> AroundPool:
    features = Counter({VISION: _cached_features(config, sizes, work, numerics)})
    policy = megatron.states_of_trainer(config, sizes, roles, numerics).on_device + features
    # the engine needs its own weights where the policy's tensors are sharded or in other processes
    width = 0 if roles.shares_tensors else numerics.width
    engine = Counter({ENGINE: sizes.parameters * width})
    # a sleeping engine keeps the weights that a weight sync does not send, and copies of the others where they fit;
    # under Megatron it keeps all of its weights
    copied = 0 if roles.is_divided else sizes.trainable * width
    asleep = Counter({ENGINE: sizes.parameters * width - copied})
    recorded = (
        Recorded() if roles.apart or roles.is_divided else recorded_bytes(config, sizes, work, roles.trainers, numerics)
    )
    update = policy + _update_peak(config, sizes, work, roles, numerics, recorded)
    if roles.apart:
        return AroundPool(rollout=engine + features, update=update, sync=Counter(), recorded=recorded, copied=0)
    rollout = engine + policy
    sync = rollout + _made_whole(sizes, numerics) if roles.is_divided else Counter[str]()
    return AroundPool(rollout=rollout, update=asleep + update, sync=sync, recorded=recorded, copied=copied)


def _made_whole(sizes: ModelSizes, numerics: Numerics) -> Bytes:
    """Bytes of the full tensors that Megatron gathers for a weight sync, all before the first is sent."""
    return Counter({WHOLE: sizes.parameters * numerics.width})


def sized_by_memory(
    config: Config, sizes: ModelSizes, work: Workload, roles: Roles, numerics: Numerics, usable_bytes: int
) -> tuple[Config, SizedTo | None]:
    """The settings with the size of the embedded engine's cache on such a GPU, and what decides that size.

    Unchanged settings and None for an engine whose pool `serving_room` sizes.
    """
    engine = config.rollout.engine
    if not isinstance(engine, EmbeddedSettings):
        return config, None
    if engine.max_batch_tokens is not None:
        return config, "rollout.engine.max_batch_tokens"
    if not numerics.cuda or sizes.decoder.delta is not None:
        return with_batch_tokens(config, DEFAULT_BATCH_TOKENS), "the default of rollout.engine.max_batch_tokens"
    around = _around_pool(config, sizes, work, roles, numerics)
    beside_update = 0 if roles.apart else usable_bytes - around.while_asleep - around.copied
    free = default_bytes(max(0, usable_bytes - around.rollout.total()), beside_update)
    tokens, fewest = free // token_bytes(sizes, numerics), prompt_demand(config, work.lengths)
    if tokens < fewest:
        # an engine refuses a prompt that does not fit its cache, so plan room for one: then the pool does not fit the
        # GPU
        return with_batch_tokens(config, fewest), "one prompt with its completions"
    return with_batch_tokens(config, tokens), LEFT_BY_UPDATE if free == beside_update else FREE_IN_ROLLOUT


def _with_own_weights(
    config: Config, sizes: ModelSizes, work: Workload, roles: Roles, numerics: Numerics, room: ServingRoom | None
) -> tuple[PhaseMemory, ...]:
    """The phases with a serving engine, which on a GPU sleeps during the update and then receives a weight sync."""
    features = Counter({VISION: _cached_features(config, sizes, work, numerics)})
    policy = megatron.states_of_trainer(config, sizes, roles, numerics).on_device + features
    update = policy + _update_peak(config, sizes, work, roles, numerics, Recorded())
    engine: Bytes = Counter() if room is None else room.bytes
    # tensors that are received and not loaded yet: a bucket and the last tensor added to it, at most the embedding
    bucket = Counter({BUCKET: BUCKET_BYTES + sizes.vocabulary * sizes.width * numerics.width})
    if roles.apart:
        return _phase("rollout", engine), _phase("update", update), _phase("weight_sync", engine + bucket)
    # the cache's pool is allocated again when the engine wakes, after the weight sync
    synced = engine if not numerics.cuda else Counter({ENGINE: engine[ENGINE]})
    asleep: Bytes = Counter() if numerics.cuda else engine
    return (
        _phase("rollout", policy + engine),
        _phase("update", update + asleep),
        _phase(
            "weight_sync", policy + synced + bucket + (_made_whole(sizes, numerics) if roles.is_divided else Counter())
        ),
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
    """Bytes of a frozen tower's features that stay in memory for the whole run."""
    if config.model.trains_vision or isinstance(config.train.backend, MegatronBackend):
        return 0
    limit = int(config.model.feature_cache_gib * 2**30)
    images = config.plan.distinct_images
    if images is None:
        return limit
    return min(limit, feature_bytes(sizes, images * work.lengths.image_tokens, numerics))
