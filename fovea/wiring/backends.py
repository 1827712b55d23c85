"""Builder of policy, engine and weight sync: in this process, in processes of torchrun, or in processes of Ray."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, cast

from fovea.cluster.loopback import own_ray_on_loopback
from fovea.cluster.placement import Placement, Role
from fovea.cluster.ray_token import use_token
from fovea.cluster.services import WorkersEngine, WorkersPolicy, WorkersWeights
from fovea.cluster.torchrun import connect_workers, join
from fovea.cluster.workers import LocalHandle, WorkerHandle, Workers, call_each
from fovea.config.backends import MegatronBackend
from fovea.config.model import Model
from fovea.config.run import Config
from fovea.models.processor import Processor
from fovea.processes.calls import Call
from fovea.rollout.base import Engine
from fovea.train.base import Policy
from fovea.train.model_division import check_processes
from fovea.utils.torchrun import num_processes
from fovea.weights.base import WeightSync
from fovea.wiring.interpreter import absolute
from fovea.wiring.workers import Setup, make_worker, worker_of
from fovea_gym.errors import ConfigError
from fovea_gym.utils.event_loop import wait_for


class Backends(NamedTuple):
    """Policy, engine and weight sync for the driver."""

    policy: Policy
    engine: Engine
    weight_sync: WeightSync
    kernel_notes: tuple[str, ...] = ()
    """Lines to print at the start (`wiring.model.kernel_notes`)."""


def open_backends(config: Config, model: Model, processor: Processor) -> Backends:
    """Load the model in the processes that the settings and torchrun define."""
    if config.cluster.num_ray_workers:
        return _on_ray(config, model)
    if num_processes() > 1:
        # the first worker is in this process, which is also the driver
        setup = Setup(config=config, model=model, placement=placement_of(config, num_processes()))
        cluster = config.cluster
        handles = connect_workers(join(cluster.collective_timeout_seconds), setup, cluster.heartbeat_timeout_seconds)
        return _backends_of([LocalHandle(worker_of(setup)), *handles], setup.placement)
    placement_of(config, num_workers=1)
    worker = make_worker(config, model, processor, Role.alone())
    assert worker.policy is not None
    assert worker.engine is not None
    return Backends(cast(Policy, worker.policy), worker.engine, worker.weight_sync, worker.kernel_notes)


def _on_ray(config: Config, model: Model) -> Backends:
    """Start all workers by Ray; this process is only the driver."""
    if num_processes() > 1:
        raise ConfigError(
            f"cluster.gpus_per_node={config.cluster.gpus_per_node} has Ray start the workers, but torchrun has started "
            f"{num_processes()} processes; leave out torchrun or cluster.gpus_per_node"
        )
    placement = placement_of(config, config.cluster.num_ray_workers)
    setup = _for_elsewhere(config, model, placement)
    use_token()
    own_ray_on_loopback()
    # imported here, since the package may be absent; the module names what to install
    ray = importlib.import_module("fovea.cluster.ray")
    workers = ray.RayWorkers(config.cluster, partial(worker_of, setup), device=config.model.device)
    try:
        return _backends_of(workers.handles, placement, workers.close)
    except BaseException:
        workers.close()
        raise


def _for_elsewhere(config: Config, model: Model, placement: Placement) -> Setup:
    """The setup for processes with another working directory, such as workers of a Ray cluster."""
    engine = config.rollout.engine
    if engine.interpreter is not None:
        engine = engine.model_copy(update={"python": absolute(engine.interpreter)})
        config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"engine": engine})})
    if model.path is not None and (path := Path(model.path).expanduser()).exists():
        model = model.model_copy(update={"path": str(path.absolute())})
    return Setup(config=config, model=model, placement=placement)


def placement_of(config: Config, num_workers: int) -> Placement:
    """The placement of `num_workers` workers; ConfigError if the settings cannot divide them."""
    if isinstance(config.train.backend, MegatronBackend):
        check_processes(config.train.backend, num_workers)
    placement = Placement.of(config.cluster, num_workers, config.train.backend.replicas)
    num_engines = len(placement.engines(range(num_workers)))
    if config.rollout.engine.has_one_leader and num_engines > 1:
        # with Megatron, all processes train and generate
        advice = (
            "train in one process, or set rollout.engine=vllm and rollout.engine.python to its own environment"
            if config.train.backend.name == "megatron"
            else "set cluster.placement=disaggregated and cluster.rollout_gpus=1"
        )
        raise ConfigError(
            f"rollout.engine={config.rollout.engine.name} with {num_engines} workers that generate is not possible, "
            f"since a single one has to lead the servers; {advice}"
        )
    return placement


def _backends_of(
    handles: Sequence[WorkerHandle], placement: Placement, release: Callable[[], None] = lambda: None
) -> Backends:
    """Make one policy and one engine of all workers, given by rank; `release` is called after they are closed."""
    facts = wait_for(call_each((handle, Call(method="describe")) for handle in handles))
    model = next(each.model for each in facts if each.model is not None)
    engine = next(each.engine for each in facts if each.engine is not None)
    repeats = all(each.repeats_in_rounds for each in facts if each.engine is not None)
    workers = Workers(placement.learners(handles), placement.engines(handles), release)
    # all devices of a run are alike
    notes = tuple(dict.fromkeys(line for each in facts for line in each.kernel_notes))
    engines = WorkersEngine(workers, engine, repeats_in_rounds=repeats)
    return Backends(cast(Policy, WorkersPolicy(workers, model)), engines, WorkersWeights(workers), notes)
