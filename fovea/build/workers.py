"""Builders of the processes that hold policy and engines: this one alone, or those that torchrun has started."""

from __future__ import annotations

import copy
import signal
from dataclasses import dataclass

import torch

from fovea.build.engine import make_engine, make_tape
from fovea.build.model import open_vlm
from fovea.build.policy import make_policy
from fovea.cluster.connection import serve
from fovea.cluster.local import SharedWeights
from fovea.cluster.torchrun import connect_to_driver, connect_workers, join
from fovea.cluster.weights import WeightSync
from fovea.cluster.workers import Worker, Workers, WorkersEngine, WorkersPolicy, WorkersWeights
from fovea.config.run import Config, Model
from fovea.models.load import pick_device
from fovea.models.processor import Processor, load_processor
from fovea.rollout.base import Engine
from fovea.run.signals import ENDING
from fovea.train.base import Policy
from fovea.train.torch.ranks import ALONE, Ranks
from fovea.utils.event_loop import wait_for
from fovea.utils.launch import num_processes


@dataclass(frozen=True, slots=True, kw_only=True)
class Backends:
    """Policy, engine and the weight sync between them, as the driver sees them."""

    policy: Policy
    engine: Engine
    weight_sync: WeightSync


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a worker process needs to make its worker."""

    config: Config
    model: Model
    """With a path, which the worker can read."""


def open_backends(config: Config, model: Model, processor: Processor) -> Backends:
    """Open the model in this process, and in those of torchrun where it has started several."""
    if num_processes() == 1:
        worker = make_worker(config, model, processor)
        return Backends(policy=worker.policy, engine=worker.engine, weight_sync=worker.weight_sync)
    handles = connect_workers(join(), Setup(config=config, model=model))
    workers = Workers(make_worker(config, model, processor, ranks_on_device(config)), handles)
    return Backends(policy=WorkersPolicy(workers), engine=WorkersEngine(workers), weight_sync=WorkersWeights(workers))


def serve_driver() -> None:
    """Make this process a worker, and serve the calls of the driver until it closes the connection."""
    connection, setup = connect_to_driver(join())
    assert isinstance(setup, Setup)
    # torchrun and a terminal signal all processes; the driver decides when the run ends, and hangs up
    for each in ENDING:
        signal.signal(each, signal.SIG_IGN)
    processor = load_processor(setup.model)
    worker = make_worker(setup.config, setup.model, processor, ranks_on_device(setup.config))
    wait_for(serve(worker, connection))


def make_worker(config: Config, model: Model, processor: Processor, ranks: Ranks = ALONE) -> Worker:
    """Make this process's share of the policy, and its engine, which has a copy of the tensors of a sharded policy."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    vlm = open_vlm(config, model, processor.banned_ids)
    tape = make_tape(config, vlm) if ranks.mesh is None else None
    # copied before the policy's tensors are sharded in place
    engine_vlm = vlm if ranks.mesh is None else copy.deepcopy(vlm).requires_grad_(False)
    policy = make_policy(config, vlm, tape, ranks)
    engine = make_engine(config, processor, engine_vlm, tape)
    return Worker.of(policy, engine, SharedWeights(policy, engine))


def ranks_on_device(config: Config) -> Ranks:
    """The ranks of the process group, with weights on the device of the settings."""
    return Ranks.of_process_group(pick_device(config.model.device).type)
