"""The plan of a recipe on a machine: memory of a GPU by part, bytes moved, FLOPs, and what to change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from fovea.config.backends import EmbeddedEngine, MegatronBackend
from fovea.config.run import Config
from fovea.plan.activations import Numerics
from fovea.plan.compute import Compute, compute_of, decoding_prompts
from fovea.plan.engine import ServingRoom, batch_tokens, serving_room
from fovea.plan.machine import Machine, machine_of
from fovea.plan.memory import PhaseMemory, phases_of, sized_by_memory
from fovea.plan.model_sizes import ModelSizes, model_sizes
from fovea.plan.moved import Moved
from fovea.plan.roles import Roles, roles_of
from fovea.plan.traffic import traffic_of
from fovea.plan.trainer import held_states
from fovea.plan.workload import Lengths, Workload, workload_of
from fovea.train.model_division import check_division


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """What one step of a run takes, for each of its GPUs alike."""

    model: str
    parameters: int
    trainable: int
    machine: Machine
    lengths: Lengths
    microbatches: int
    """Packed rows of a rank in a step."""
    phases: tuple[PhaseMemory, ...]
    on_host: Mapping[str, int]
    """Bytes by part that a GPU's process holds in the host's memory, for `cpu_offload` or `optimizer_offload`."""
    room: ServingRoom | None
    """What an engine with weights of its own takes; None for the embedded one, and for servers."""
    batch_tokens: int | None
    """Tokens of the embedded engine's key-value cache; None for other engines."""
    rows: int | None
    """Completions that an engine decodes at once on average; None where servers elsewhere generate."""
    traffic: tuple[Moved, ...]
    compute: tuple[Compute, ...]

    @property
    def peak(self) -> PhaseMemory:
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def missing_bytes(self) -> int:
        """Bytes that it takes beyond what a GPU has, and that the engine's cache lacks for one conversation."""
        too_much = max(0, self.peak.total - self.machine.usable_bytes)
        return too_much + (0 if self.room is None else self.room.missing_bytes)

    @property
    def fits(self) -> bool:
        return not self.missing_bytes

    def to_json(self) -> dict[str, Any]:
        """Plain values, sizes in bytes."""
        return asdict(self) | {"fits": self.fits, "usable_bytes": self.machine.usable_bytes}


def make_plan(config: Config, sizes: ModelSizes | None = None, machine: Machine | None = None) -> RunPlan:
    """Plan a step of these settings, on the machine that they name unless another is given.

    `sizes` are those of the model, read from its config if not given. Of Megatron's pipeline stages, it is the plan of
    the one whose GPUs hold most.

    ModelError where the config cannot be read, TrainError where a completion does not fit a micro-batch, ConfigError
    where Megatron cannot divide the model or the GPUs so.
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
    config = sized_by_memory(config, sizes, work, roles, numerics, machine.usable_bytes)
    room = serving_room(config, sizes, machine, roles, numerics)
    prompts = decoding_prompts(config, work, numerics, room)
    return RunPlan(
        model=config.model.name,
        parameters=sizes.parameters,
        trainable=sizes.trainable,
        machine=machine,
        lengths=work.lengths,
        microbatches=sum(map(len, work.rows)),
        phases=phases_of(config, sizes, work, roles, numerics, room, machine.usable_bytes),
        on_host=held_states(config, sizes, roles, numerics).on_host,
        room=room,
        batch_tokens=batch_tokens(config) if isinstance(config.rollout.engine, EmbeddedEngine) else None,
        rows=None if prompts is None else prompts * config.rollout.samples_per_prompt,
        traffic=traffic_of(config, sizes, work, roles, numerics),
        compute=compute_of(config, sizes, work, machine, roles, numerics, room),
    )
