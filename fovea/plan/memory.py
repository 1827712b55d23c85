"""Memory of one process by part, at the peaks of the rollout and of the update."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from fovea.cluster.engine_stream import BUCKET_BYTES
from fovea.config.backends import EmbeddedEngine
from fovea.config.run import Config
from fovea.plan.activations import Numerics
from fovea.plan.engine import ServingRoom
from fovea.plan.model_sizes import ModelSizes
from fovea.plan.recorded import Recorded, recorded_bytes
from fovea.plan.roles import Roles
from fovea.plan.rollout import rollout_peak
from fovea.plan.states import ENGINE, held_states
from fovea.plan.update import update_peak
from fovea.plan.vision import VISION, feature_bytes
from fovea.plan.walk import Bytes
from fovea.plan.workload import Workload

BUCKET = "weights on their way"


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseMemory:
    """Bytes by part at the peak of one phase."""

    phase: str
    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def phases_of(
    config: Config, sizes: ModelSizes, work: Workload, roles: Roles, numerics: Numerics, room: ServingRoom | None
) -> tuple[PhaseMemory, ...]:
    """The memory of a process in each phase of a step, after the first step; `room` is that of its engine.

    Where GPUs train or generate and never both, each phase is that of its own GPUs.
    """
    if not isinstance(config.rollout.engine, EmbeddedEngine):
        return _with_own_weights(config, sizes, work, roles, numerics, room)
    ranks = roles.trainers
    features = Counter({VISION: _cached_features(config, sizes, work, numerics)})
    policy = held_states(config, sizes, ranks, numerics).on_device + features
    # the policy's tensors are in other processes, or sharded, so that an engine cannot use them
    width = 0 if roles.shares_tensors else numerics.width
    engine = Counter({ENGINE: sizes.parameters * width})
    # while it sleeps it keeps the weights that no push brings
    asleep = Counter({ENGINE: (sizes.parameters - sizes.trainable) * width})
    recorded = Recorded() if roles.apart else recorded_bytes(config, sizes, work, ranks, numerics)
    rollout = engine + rollout_peak(config, sizes, work, numerics, recorded)
    update = policy + update_peak(config, sizes, work, ranks, numerics, recorded)
    if roles.apart:
        return _phase("rollout", rollout + features), _phase("update", update)
    return _phase("rollout", policy + rollout), _phase("update", asleep + update)


def _with_own_weights(
    config: Config, sizes: ModelSizes, work: Workload, roles: Roles, numerics: Numerics, room: ServingRoom | None
) -> tuple[PhaseMemory, ...]:
    """The phases with an engine that sleeps during the update, on a GPU, and gets a push of weights after it."""
    features = Counter({VISION: _cached_features(config, sizes, work, numerics)})
    policy = held_states(config, sizes, roles.trainers, numerics).on_device + features
    update = policy + update_peak(config, sizes, work, roles.trainers, numerics, Recorded())
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
        _phase("push", policy + pushed + bucket),
    )


def _phase(name: str, held: Bytes) -> PhaseMemory:
    return PhaseMemory(phase=name, parts={part: size for part, size in held.items() if size})


def _cached_features(config: Config, sizes: ModelSizes, work: Workload, numerics: Numerics) -> int:
    """Features of a frozen tower that stay in memory for the whole run."""
    if config.model.trains_vision:
        return 0
    limit = int(config.model.feature_cache_gib * 2**30)
    images = config.plan.distinct_images
    if images is None:
        return limit
    return min(limit, feature_bytes(sizes, images * work.lengths.image_tokens, numerics))
