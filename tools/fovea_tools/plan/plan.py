"""The plan of a recipe on a machine: memory of a GPU by part, work and seconds of a step, and settings to change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

from pydantic import ValidationError

from fovea.config.backends import EmbeddedSettings, MegatronBackend, ServingEngine, SglangSettings, VllmSettings
from fovea.config.run import Config
from fovea.errors import TrainError
from fovea.train.model_division import check_division
from fovea_gym.errors import ConfigError
from fovea_gym.settings.base import Tree, over
from fovea_tools.plan.activations import Numerics
from fovea_tools.plan.compute import GIGA, Compute, compute_of, decoding_prompts, received_bytes
from fovea_tools.plan.engine import ServingRoom, batch_tokens, serving_room
from fovea_tools.plan.machine import Machine, machine_of
from fovea_tools.plan.megatron import states_of_trainer
from fovea_tools.plan.memory import PhaseMemory, SizedTo, phases_of, sized_by_memory
from fovea_tools.plan.model_sizes import ModelSizes, model_sizes
from fovea_tools.plan.rollout import prompt_demand
from fovea_tools.plan.workload import Lengths, Roles, Workload, roles_of, workload_of


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """Memory, work and traffic of one step on each GPU."""

    model: str
    parameters: int
    trainable: int
    is_tiny: bool
    """True for a tiny model, whose vocabulary may turn out smaller than the planned limit."""
    machine: Machine
    lengths: Lengths
    microbatches: int
    """Packed rows of a rank in a step."""
    phases: tuple[PhaseMemory, ...]
    on_host: Mapping[str, int]
    """Bytes by part that a GPU's process holds in host memory, for `cpu_offload` or `optimizer_offload`."""
    room: ServingRoom | None
    """Memory of an engine that holds its own weights; None for the embedded engine and for external servers."""
    batch_tokens: int | None
    """Tokens of the embedded engine's key-value cache; None for other engines."""
    cache_sized_to: SizedTo | None
    """The setting or rule that decides the size of the key-value cache; None if external servers generate."""
    rows: int | None
    """Average number of completions that an engine decodes at once; None if external servers generate."""
    received_bytes: int
    """Bytes that a training GPU receives from others in a step."""
    compute: tuple[Compute, ...]

    @property
    def peak(self) -> PhaseMemory:
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def missing_bytes(self) -> int:
        """Bytes beyond the memory of a GPU, plus those that the engine's cache lacks for one conversation."""
        too_much = max(0, self.peak.total - self.machine.usable_bytes)
        return too_much + (0 if self.room is None else self.room.missing_bytes)

    @property
    def link_seconds(self) -> float | None:
        """Seconds of the traffic at the link's rate without overlap; None if that rate is unknown."""
        rate = self.machine.link_gb_per_second
        return None if rate is None else self.received_bytes / (rate * GIGA)

    @property
    def fits(self) -> bool:
        return not self.missing_bytes

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values, with sizes in bytes."""
        return asdict(self) | {"fits": self.fits, "usable_bytes": self.machine.usable_bytes}


def make_plan(config: Config, sizes: ModelSizes | None = None, machine: Machine | None = None) -> RunPlan:
    """Plan a step of these settings, on the given machine or on the one that the settings name.

    `sizes` are the model's, and are read from its config by default. With Megatron's pipeline stages, the plan
    describes the stage whose GPUs hold most.

    Raises ModelError if the config cannot be read, TrainError if a completion does not fit a micro-batch, and
    ConfigError if Megatron cannot divide the model or the GPUs as set.
    """
    machine = machine_of(config.plan, config.cluster, config.model.device) if machine is None else machine
    sizes = model_sizes(config) if sizes is None else sizes
    roles = roles_of(config, machine.gpus)
    if isinstance(config.train.backend, MegatronBackend):
        check_division(sizes.family.model_type, sizes.text, config.train.backend)
    work = workload_of(config, sizes, roles)
    stages = [replace(roles, stage=number) for number in range(roles.stages)]
    return max((_of_stage(config, sizes, machine, each, work) for each in stages), key=lambda plan: plan.peak.total)


def _of_stage(config: Config, sizes: ModelSizes, machine: Machine, roles: Roles, work: Workload) -> RunPlan:
    numerics = Numerics.of(config, machine.gpu.is_cuda)
    config, sized_to = sized_by_memory(config, sizes, work, roles, numerics, machine.usable_bytes)
    room = serving_room(config, sizes, machine, roles, numerics)
    prompts = decoding_prompts(config, work, numerics, room)
    return RunPlan(
        model=config.model.name,
        parameters=sizes.parameters,
        trainable=sizes.trainable,
        is_tiny=config.model.tiny is not None,
        machine=machine,
        lengths=work.lengths,
        microbatches=sum(map(len, work.rows)),
        phases=phases_of(config, sizes, work, roles, numerics, room, machine.usable_bytes),
        on_host=states_of_trainer(config, sizes, roles, numerics).on_host,
        room=room,
        batch_tokens=batch_tokens(config) if isinstance(config.rollout.engine, EmbeddedSettings) else None,
        cache_sized_to=sized_to if room is None else room.sized_to,
        rows=None if prompts is None else prompts * config.rollout.samples_per_prompt,
        received_bytes=received_bytes(config, sizes, work, roles, numerics),
        compute=compute_of(config, sizes, work, machine, roles, numerics, room),
    )


STEP_TOKENS = 1024
SHARES = tuple(each / 20 for each in range(2, 20))
"""Shares of a GPU that the advice tries for an engine."""
MOST_GPUS = 512
TENSOR_SIZES = (2, 4, 8)
"""Tensor-parallel sizes that the advice tries."""


Settings: TypeAlias = Mapping[str, Any]
"""Values by dotted key."""


Change: TypeAlias = Sequence[Settings]
"""Alternatives for one change, cheapest first; each sets one or more settings."""


def _values(key: str, values: Iterable[Any]) -> Change:
    """A change that tries several values of one setting."""
    return [{key: value} for value in values]


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Settings with which the plan fits."""

    settings: tuple[str, ...]
    """`key=value`, as on the command line."""
    gib: float
    """Peak memory of a GPU with these settings."""


def advice_for(config: Config) -> list[Advice]:
    """Single changes that make the plan fit, each in its mildest form; otherwise a combination of changes.

    Empty if no known change makes it fit.
    """
    sizes: dict[str, ModelSizes] = {}

    def plan(changed: Config) -> RunPlan:
        # the sizes depend only on the model's settings, which also decide what is trained
        model = changed.model.model_dump_json()
        if model not in sizes:
            sizes[model] = model_sizes(changed)
        return make_plan(changed, sizes[model])

    planned = plan(config)
    changes = list(changes_for(config, planned))
    alone = [found for change in changes if (found := _mildest(config, change, plan))]
    return alone or _together(config, planned, changes, plan)


Planner = Callable[[Config], RunPlan]


Try: TypeAlias = tuple[Settings, Config, RunPlan]
"""One alternative of a change, the whole config with it, and the plan of that config."""


def _tries(config: Config, change: Change, plan: Planner) -> Iterator[Try]:
    """The alternatives of a change in order, without those that contradict the other settings."""
    for settings in change:
        try:
            changed = with_settings(config, settings)
            planned = plan(changed)
        except (ValidationError, ConfigError, TrainError):
            continue  # TrainError: a completion no longer fits a micro-batch
        yield settings, changed, planned


def _mildest(config: Config, change: Change, plan: Planner) -> Advice | None:
    """The first alternative whose plan fits."""
    tries = _tries(config, change, plan)
    return next((_advice(settings, planned) for settings, _, planned in tries if planned.fits), None)


def _together(config: Config, planned: RunPlan, changes: Sequence[Change], plan: Planner) -> list[Advice]:
    """Apply the changes in order, each with the alternative that saves most, until the plan fits."""
    made: dict[str, Any] = {}
    # go through them twice: while the update has the higher peak, saving memory in the rollout changes nothing
    for change in [*changes, *changes]:
        tries = list(_tries(config, change, plan))
        for settings, _, tried in tries:
            if tried.fits:
                return [_advice(made | dict(settings), tried)]
        best = min(tries, key=lambda each: each[2].missing_bytes, default=None)
        if best is not None and best[2].missing_bytes < planned.missing_bytes:
            settings, config, planned = best
            made |= settings
    return []


def _advice(settings: Settings, planned: RunPlan) -> Advice:
    written = tuple(
        f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in settings.items()
    )
    return Advice(settings=written, gib=planned.peak.total / 2**30)


def changes_for(config: Config, planned: RunPlan) -> Iterator[Change]:
    """Changes in the order of their cost: those that cost time, then those that train less, then more machines."""
    train, model, machine = config.train, config.model, planned.machine
    ways = ("none", "selective", "full")
    yield _values("train.gradient_checkpointing", ways[ways.index(train.gradient_checkpointing) + 1 :])
    yield _smaller_rows(config)
    yield _cache(config, planned)
    backend = train.backend
    yield _values("train.backend.logits_mib", [mib for mib in (256, 128, 64) if mib < backend.logits_mib])
    if isinstance(backend, MegatronBackend):
        yield from _divided_further(backend)
    fewer_replicas = [n for n in range(backend.replicas - 1, 0, -1) if backend.replicas % n == 0]
    yield _values("train.backend.replicas", fewer_replicas)
    yield _apart(config, machine.gpus)
    if not model.trains_vision:
        yield _values("model.feature_cache_gib", [gib for gib in (1, 0) if gib < model.feature_cache_gib])
    if machine.gpu.is_cuda and not backend.cpu_offload:
        yield _values("train.backend.cpu_offload", [True])
    if model.dtype == "float32":
        yield _values("model.dtype", ["bfloat16"])
    if model.trains_vision:
        yield _values("model.freeze_vision_tower", [True])
    more = [machine.gpus << power for power in range(1, 10)]
    yield _values("plan.gpus", [gpus for gpus in more if gpus <= MOST_GPUS])
    if model.lora is None:
        yield _values("model.lora.rank", [16])


def _divided_further(backend: MegatronBackend) -> Iterator[Change]:
    """Changes for Megatron: optimizer states in host memory, and layers and their tokens split over more GPUs."""
    if not backend.optimizer_offload:
        yield _values("train.backend.optimizer_offload", [True])
    place, now = "train.backend", backend.tensor_parallel_size
    sizes = [each for each in TENSOR_SIZES if each > now or (each == now and not backend.sequence_parallel)]
    yield [{f"{place}.tensor_parallel_size": each, f"{place}.sequence_parallel": True} for each in sizes]


def _cache(config: Config, planned: RunPlan) -> Change:
    """The change of the key-value cache's size."""
    engine = config.rollout.engine
    if planned.batch_tokens is not None:
        # an engine refuses a prompt that does not fit the cache together with its completions
        fewest = prompt_demand(config, planned.lengths)
        in_cache = [each for each in _fewer(planned.batch_tokens) if each >= fewest]
        return _values("rollout.engine.max_batch_tokens", in_cache)
    if isinstance(engine, VllmSettings) and engine.kv_cache_gib is not None:
        return _values("rollout.engine.kv_cache_gib", [engine.kv_cache_gib * 2**power for power in (-1, -2, 1, 2)])
    if isinstance(engine, SglangSettings) and engine.max_total_tokens is not None:
        tokens = engine.max_total_tokens
        return _values("rollout.engine.max_total_tokens", [*_fewer(tokens), 2 * tokens, 4 * tokens])
    if isinstance(engine, ServingEngine):
        share = engine.gpu_memory_utilization
        lower, higher = [each for each in SHARES if each < share], [each for each in SHARES if each > share]
        return _values("rollout.engine.gpu_memory_utilization", [*reversed(lower), *higher])
    return ()


def _apart(config: Config, gpus: int) -> Change:
    """Dedicated GPUs for generation, at most half, so that no GPU holds both shards and an engine's weights."""
    if config.cluster.placement == "disaggregated":
        return ()
    shares = [gpus // part for part in (2, 4, 8) if gpus >= part]
    return [{"cluster.placement": "disaggregated", "cluster.rollout_gpus": each} for each in shares]


def _smaller_rows(config: Config) -> Change:
    train = config.train
    if train.enable_dynamic_batch_size:
        return _values("train.max_tokens_per_microbatch", _fewer(train.max_tokens_per_microbatch))
    return _values("train.groups_per_microbatch", range(train.groups_per_microbatch - 1, 0, -1))


def _fewer(tokens: int) -> list[int]:
    """Smaller numbers of tokens, in steps of a sixteenth of the next power of two, but at least STEP_TOKENS."""
    step = max(STEP_TOKENS, (1 << (tokens - 1).bit_length()) // 16)
    return [each for each in range(tokens - tokens % step, 0, -step) if each < tokens]


def with_settings(config: Config, settings: Settings) -> Config:
    """A copy of the config with some settings changed."""
    tree: Tree = {}
    for key, value in settings.items():
        inner = tree
        *sections, name = key.split(".")
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = value
    return Config.model_validate(over(config.model_dump(), tree))
