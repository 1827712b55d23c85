"""Builders of a worker: what one of several processes holds of policy and engines."""

from __future__ import annotations

import copy
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from fovea.cluster.placement import Placement, Role
from fovea.cluster.remote import rules_of
from fovea.cluster.torchrun import connect_to_driver, join
from fovea.cluster.workers import Worker
from fovea.config.backends import EmbeddedSettings, VllmServersSettings
from fovea.config.model import Model
from fovea.config.run import Config
from fovea.models.load import pick_device
from fovea.models.outgoing import in_layout_of_files, outgoing
from fovea.models.policy_network import PolicyNetwork
from fovea.models.processor import Processor, load_processor
from fovea.processes.heartbeat import beating
from fovea.processes.serving import CallerConnection, serve_connection
from fovea.rollout.base import Engine
from fovea.run.microbatches import leaving_limit
from fovea.run.signals import ENDING
from fovea.train.local import Caller, CallerThread, LocalPolicy, call_here
from fovea.train.ranks import ALONE, Ranks
from fovea.weights.base import WeightSink
from fovea.weights.broadcast import Broadcast, ReceivedWeights
from fovea.weights.push import WeightPusher
from fovea.weights.sinks import NetworkCopy, SharedTensors
from fovea.wiring.engine import free_first, has_own_weights, make_embedded, make_streamed
from fovea.wiring.interpreter import set_threads
from fovea.wiring.megatron import PushedPolicy, make_megatron_policy, trains_with_megatron
from fovea.wiring.model import kernel_notes, open_vlm
from fovea.wiring.policy import make_policy
from fovea_gym.errors import ConfigError
from fovea_gym.utils.event_loop import wait_for


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Settings and place of a worker, from which its process makes it."""

    config: Config
    model: Model
    """With a path, which the worker can read."""
    placement: Placement


def serve_driver() -> None:
    """Make this process a worker, and serve the calls of the driver until it closes the connection."""
    connection, setup = connect_to_driver(join())
    assert isinstance(setup, Setup)
    # torchrun and a terminal signal all processes; the driver decides when the run ends, and hangs up
    for each in ENDING:
        signal.signal(each, signal.SIG_IGN)
    driver = CallerConnection(connection)
    # torchrun's processes share a machine: the size is left by this one, since the driver may wait in a collective call
    # of NCCL until torchrun kills it
    config = setup.config
    leaving = leaving_limit(Path(config.run_dir), config.train.max_tokens_per_microbatch)
    # from here on, since loading a model takes minutes
    with leaving, beating(driver.send, config.cluster.heartbeat_timeout_seconds):
        worker = worker_of(setup)
        wait_for(serve_connection(worker, driver, rules_of(worker)))


def worker_of(setup: Setup) -> Worker:
    """Make the worker of this process, which all processes of the process group must do."""
    timeout = timedelta(seconds=setup.config.cluster.collective_timeout_seconds)
    role = Role.of(setup.placement, pick_device(setup.config.model.device).type, timeout)
    return make_worker(setup.config, setup.model, load_processor(setup.model), role)


def make_worker(config: Config, model: Model, processor: Processor, role: Role) -> Worker:
    """Make this process's share of the policy, its engine, or both, as its role says."""
    check_offload(config)
    set_threads(config)
    if role.learners is None:
        assert role.receivers is not None
        pair = next(iter(role.pairs.values()), None)
        network = None
        if not has_own_weights(config):
            network = open_vlm(config, model, processor.banned_ids, role.everyone).requires_grad_(False)
        engine, sink = _engine_and_sink(config, model, processor, network)
        return Worker(
            policy=None,
            engine=engine,
            weight_sync=ReceivedWeights(role.receivers, sink, pair),
            kernel_notes=() if network is None else kernel_notes(config, network),
        )
    if trains_with_megatron(config):
        return make_megatron_worker(config, model, processor, role.everyone)
    # an engine that holds its own weights reads them itself
    readers = role.learners if has_own_weights(config) else role.everyone
    vlm = open_vlm(config, model, processor.banned_ids, readers)
    notes = kernel_notes(config, vlm)
    # copied before the policy's tensors are sharded in place; those of a single learner are shared
    copied = role.has_engine and role.learners.mesh is not None and not has_own_weights(config)
    engine_vlm = copy.deepcopy(vlm).requires_grad_(False) if copied else vlm
    call = CallerThread("policy") if role.in_thread else call_here
    pushed = [each.name for each in outgoing(vlm.network) if each.is_trained] if copied else []
    policy = make_policy(config, vlm, ranks=role.learners)
    beside = [_engine_and_sink(config, model, processor, engine_vlm, pushed, is_copy=copied)] if role.has_engine else []
    for engine, _ in beside:
        free_first(policy, engine)
    sinks = [sink for _, sink in beside]
    if role.receivers is not None:
        sinks.append(Broadcast(role.receivers, role.pairs))
    return Worker(
        policy=LocalPolicy(policy, call),
        engine=beside[0][0] if beside else None,
        weight_sync=make_pusher(config, policy, sinks, call),
        kernel_notes=notes,
    )


def make_megatron_worker(config: Config, model: Model, processor: Processor, everyone: Ranks = ALONE) -> Worker:
    """Make the part of `everyone`'s policy under Megatron that this process has, and an engine beside it."""
    network = None
    if not has_own_weights(config):
        network = open_vlm(config, model, processor.banned_ids, everyone).requires_grad_(False)
    policy = make_megatron_policy(config, model, processor.banned_ids)
    engine, sink = _engine_and_sink(config, model, processor, network)
    free_first(policy, engine)
    return Worker(
        policy=LocalPolicy(policy),
        engine=engine,
        weight_sync=make_pusher(config, policy, [sink]),
        kernel_notes=() if network is None else kernel_notes(config, network),
    )


def make_pusher(
    config: Config, policy: PushedPolicy, sinks: Sequence[WeightSink], call: Caller = call_here
) -> WeightPusher:
    """Make the pushes of this process's policy, in the form that the engine of the settings takes."""
    weights = policy.outgoing if config.rollout.engine.takes_adapters else policy.outgoing_merged
    in_form = (lambda: in_layout_of_files(weights())) if has_own_weights(config) else weights
    # a server that is started again has lost what earlier pushes brought
    always_all = isinstance(config.rollout.engine, VllmServersSettings)
    return WeightPusher(in_form, sinks, dtype=policy.dtype, always_all=always_all, call=call)


def _engine_and_sink(
    config: Config,
    model: Model,
    processor: Processor,
    vlm: PolicyNetwork | None,
    pushed: Sequence[str] = (),
    *,
    is_copy: bool = True,
) -> tuple[Engine, WeightSink]:
    """Make the engine of this process, and its sink of weights; one with its own weights needs no network.

    `pushed` are the weights of a network beside a policy's that every push brings; without `is_copy`, the network is
    the policy's.
    """
    settings = config.rollout.engine
    if isinstance(settings, EmbeddedSettings):
        assert vlm is not None, "the embedded engine samples with a network"
        embedded = make_embedded(settings, processor, vlm, pushed=pushed)
        return embedded, NetworkCopy(embedded) if is_copy else SharedTensors(embedded)
    streamed = make_streamed(config, settings, model, processor)
    return streamed, streamed


def check_offload(config: Config) -> None:
    """ConfigError where there is no other memory to offload to."""
    device = pick_device(config.model.device).type
    if config.train.backend.cpu_offload and device != "cuda":
        raise ConfigError(
            f"train.backend.cpu_offload=true, but the model is on {device}, whose memory is the host's "
            "already; set train.backend.cpu_offload=false"
        )
