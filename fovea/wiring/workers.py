"""Builders of a worker: the part of policy and engines that one process holds."""

from __future__ import annotations

import copy
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

from fovea.cluster.placement import Placement, Role
from fovea.cluster.remote import rules_of
from fovea.cluster.torchrun import connect_to_driver, join
from fovea.cluster.workers import Worker
from fovea.config.model import Model
from fovea.config.run import Config
from fovea.models.load import pick_device
from fovea.models.processor import Processor, load_processor
from fovea.models.weights_to_sync import in_layout_of_files, weights_to_sync
from fovea.processes.heartbeat import beating
from fovea.processes.serving import CallerConnection, serve_connection
from fovea.rollout.access import EngineAccess
from fovea.run.microbatches import leaving_limit
from fovea.run.signals import ENDING
from fovea.train.local import Caller, CallerThread, LocalPolicy, call_here
from fovea.train.ranks import Ranks
from fovea.train.update import PolicyAccess, TrainedPolicy
from fovea.weights.base import WeightReceiver, WeightSync
from fovea.weights.broadcast import Broadcast, ReceivedWeights
from fovea.weights.sync import NetworkEngine, SharedWeights, WeightSender
from fovea.wiring.engine import connect_free_memory, engine_access, make_engine, make_tape, receiver_of
from fovea.wiring.interpreter import set_threads
from fovea.wiring.model import kernel_notes, open_vlm
from fovea_gym.errors import ConfigError
from fovea_gym.utils.event_loop import wait_for


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Settings and placement from which a process makes its worker."""

    config: Config
    model: Model
    """Model settings with a path that the worker can read."""
    placement: Placement


def serve_driver() -> None:
    """Make this process a worker, and serve the calls of the driver until it closes the connection."""
    connection, setup = connect_to_driver(join())
    assert isinstance(setup, Setup)
    # torchrun and terminals signal all processes; but the driver decides when the run ends, and closes the connection
    for each in ENDING:
        signal.signal(each, signal.SIG_IGN)
    driver = CallerConnection(connection)
    # torchrun's processes share a machine: this process writes the micro-batch size, since the driver may wait in a
    # collective call of NCCL until torchrun kills it
    config = setup.config
    leaving = leaving_limit(Path(config.run_dir), config.train.max_tokens_per_microbatch)
    # heartbeats begin here, since loading a model takes minutes
    with leaving, beating(driver.send, config.cluster.heartbeat_timeout_seconds):
        worker = worker_of(setup)
        wait_for(serve_connection(worker, driver, rules_of(worker)))


def worker_of(setup: Setup) -> Worker:
    """Make the worker of this process; all processes of the process group must make this call."""
    timeout = timedelta(seconds=setup.config.cluster.collective_timeout_seconds)
    role = Role.of(setup.placement, pick_device(setup.config.model.device).type, timeout)
    return make_worker(setup.config, setup.model, load_processor(setup.model), role)


def make_worker(config: Config, model: Model, processor: Processor, role: Role) -> Worker:
    """Make this process's shard of the policy, its engine, or both, by its role."""
    check_offload(config)
    set_threads(config)
    shares_weights, access = config.rollout.engine.shares_weights, engine_access(config, model, processor)
    if role.learners is None:
        assert role.receivers is not None
        pair = next(iter(role.pairs.values()), None)
        network = None
        if shares_weights:
            network = open_vlm(config, model, processor.banned_ids, role.everyone).requires_grad_(False)
        engine = make_engine(config, replace(access, network=network))
        return Worker(
            policy=None,
            engine=engine,
            weight_sync=ReceivedWeights(role.receivers, receiver_of(engine), pair),
            kernel_notes=() if network is None else kernel_notes(config, network),
        )
    if not config.train.backend.shares_network:
        return _worker_with_two_networks(config, access, role.everyone)
    # an engine with its own weights reads them itself
    readers = role.everyone if shares_weights else role.learners
    vlm = open_vlm(config, model, processor.banned_ids, readers)
    notes = kernel_notes(config, vlm)
    # a single learner shares its tensors with the engine; several copy them before the policy shards them in place
    is_shared = shares_weights and role.learners.mesh is None
    if shares_weights and role.has_engine and not is_shared:
        synced = [each.name for each in weights_to_sync(vlm.network) if each.is_trained]
        access = replace(access, network=copy.deepcopy(vlm).requires_grad_(False), synced=synced)
    elif shares_weights:
        tape = make_tape(config, vlm) if role.is_alone else None
        access = replace(access, network=vlm, tape=tape, can_free_memory=role.is_alone)
    call = CallerThread("policy") if role.in_thread else call_here
    policy = config.train.backend.make(
        PolicyAccess(
            config=config,
            model=model,
            banned_ids=processor.banned_ids,
            network=vlm,
            tape=access.tape,
            ranks=role.learners,
        )
    )
    receivers: list[WeightReceiver] = [] if role.receivers is None else [Broadcast(role.receivers, role.pairs)]
    beside = make_engine(config, access) if role.has_engine else None
    if beside is not None:
        connect_free_memory(policy, beside)
    sync: WeightSync
    if is_shared and isinstance(beside, NetworkEngine):
        sync = SharedWeights(beside, make_weight_sender(config, policy, receivers, call) if receivers else None)
    else:
        own = [] if beside is None else [receiver_of(beside)]
        sync = make_weight_sender(config, policy, [*own, *receivers], call)
    return Worker(policy=LocalPolicy(policy, call), engine=beside, weight_sync=sync, kernel_notes=notes)


def _worker_with_two_networks(config: Config, access: EngineAccess, everyone: Ranks) -> Worker:
    """Make this process's part of a policy whose network no engine can sample with, and a separate engine."""
    model, banned_ids, network = access.model, access.processor.banned_ids, None
    if config.rollout.engine.shares_weights:
        network = open_vlm(config, model, banned_ids, everyone).requires_grad_(False)
    policy = config.train.backend.make(PolicyAccess(config=config, model=model, banned_ids=banned_ids))
    engine = make_engine(config, replace(access, network=network))
    connect_free_memory(policy, engine)
    return Worker(
        policy=LocalPolicy(policy),
        engine=engine,
        weight_sync=make_weight_sender(config, policy, [receiver_of(engine)]),
        kernel_notes=() if network is None else kernel_notes(config, network),
    )


def make_weight_sender(
    config: Config, policy: TrainedPolicy, receivers: Sequence[WeightReceiver], call: Caller = call_here
) -> WeightSender:
    """Make the sender of this process's policy, which sends weights in the form that the engine takes."""
    settings = config.rollout.engine
    weights = policy.weights_to_sync if settings.takes_adapters else policy.merged_weights_to_sync
    in_form = weights if settings.shares_weights else (lambda: in_layout_of_files(weights()))
    return WeightSender(in_form, receivers, dtype=policy.dtype, always_all=settings.forgets_weights, call=call)


def check_offload(config: Config) -> None:
    """ConfigError for offloading if the model is on the CPU already."""
    device = pick_device(config.model.device).type
    if config.train.backend.cpu_offload and device != "cuda":
        raise ConfigError(
            f"train.backend.cpu_offload=true, but the model is on {device}, whose memory is the host's "
            "already; set train.backend.cpu_offload=false"
        )
