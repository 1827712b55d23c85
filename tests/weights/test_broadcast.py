"""Weights of one process in the engine of another, over a real process group: what travels, and what is refused."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fovea.cluster.placement import Placement, Role
from fovea.config.model import Lora, Model, TinyModel
from fovea.config.run import Config
from fovea.models.trainable import choose_trainable, factored_weights, trainable_parameters
from fovea.models.weights_to_sync import WeightToSync
from fovea.types import Shape, Weights
from fovea.weights import sync
from fovea.weights.base import WeightSync
from fovea.weights.broadcast import Broadcast, ReceivedWeights
from fovea.weights.sync import NetworkCopy, WeightSender
from fovea.wiring.workers import make_weight_sender
from fovea_gym.errors import FoveaError
from fovea_gym.utils.event_loop import wait_for
from tests.policies import make_policy
from tests.rollout.drawing import make_engine
from tests.tiny_models import tiny
from tests.warm import run_ranks

PATIENCE = timedelta(seconds=120)
LORA = Model(tiny=TinyModel(), lora=Lora(rank=4))
FROZEN_TOWER = Model(tiny=TinyModel(), freeze_vision_tower=True)
EMBEDDED = Config.model_validate({"model": {"tiny": {}}})
SERVERS = Config.model_validate(
    {
        "model": {"tiny": {}},
        "rollout": {"engine": {"name": "vllm_servers", "servers": ["http://127.0.0.1:8000"], "weights_dir": "weights"}},
    }
)
CASES = {"lora": LORA, "frozen tower": FROZEN_TOWER}


class Forgets:
    """Servers that may have lost what earlier weight syncs brought: each weight sync must bring all weights."""

    has_weights = False

    def __init__(self) -> None:
        self.names: list[list[str]] = []

    def begin_sync(self, shapes: Mapping[str, Shape]) -> None:
        self.names.append(list(shapes))

    def receive_weights(self, bucket: Sequence[tuple[str, Tensor]]) -> None: ...

    def finish_sync(self, version: int) -> None: ...


class TwoNamesOfOneTensor:
    """An engine whose weight a is overwritten by what it gets for b."""

    def own_weights(self) -> Weights:
        shared = torch.zeros(4)
        return [("a", shared), ("b", shared)]

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        raise AssertionError("weights that differ were loaded")


def given() -> list[WeightToSync]:
    tensors = {"a": torch.ones(4), "b": torch.arange(4.0)}
    return [WeightToSync(name=name, parameter=tensor) for name, tensor in tensors.items()]


def syncs(sync: WeightSync, number: int) -> list[Any]:
    """Reports of so many syncs, or the error of one."""
    try:
        return [asdict(wait_for(sync.sync(version))) for version in range(number)]
    except FoveaError as error:
        return [f"{type(error).__name__}: {error}"]


def sent(role: Role, settings: Model, run: Config = EMBEDDED) -> dict[str, Any]:
    """Two syncs of a policy, between which training changes its weights."""
    parts = tiny("qwen3_vl")
    choose_trainable(parts.network, settings, seed=0)
    policy = make_policy(parts)
    assert role.receivers is not None
    sync = make_weight_sender(run, policy, [Broadcast(role.receivers)])
    reports = syncs(sync, 1)
    with torch.no_grad():
        for weight in trainable_parameters(parts.network).values():
            weight.add_(0.5)
    reports += [asdict(wait_for(sync.sync(1)))]
    trained = sum(weight.nbytes for weight in trainable_parameters(parts.network).values())
    return {"reports": reports, "weights": dict(factored_weights(parts.network)), "trained_bytes": trained}


def received(role: Role, settings: Model) -> dict[str, Any]:
    """The same syncs, into an engine that begins with other weights."""
    parts = tiny("qwen3_vl")
    choose_trainable(parts.network, settings, seed=0)
    parts.network.requires_grad_(False)
    for weight in parts.network.parameters():
        weight.add_(1.0)
    assert role.receivers is not None
    sync = ReceivedWeights(role.receivers, NetworkCopy(make_engine(parts)))
    return {"reports": syncs(sync, 2), "weights": dict(factored_weights(parts.network))}


def process(rank: int, port: int, folder: Path) -> None:
    """Rank 0 is a learner, rank 1 an engine alone."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    sync.BUCKET_BYTES = 10_000  # several buckets, and tensors larger than one
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=PATIENCE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=PATIENCE)
    role = Role.of(Placement(num_learners=1, num_engines_only=1, learners_generate=False), "cpu", PATIENCE)
    assert role.receivers is not None
    found = {case: (received if rank else sent)(role, settings) for case, settings in CASES.items()}
    for case, target in (("other names", make_engine(tiny("qwen3_vl"))), ("broken", TwoNamesOfOneTensor())):
        take = ReceivedWeights(role.receivers, NetworkCopy(target))
        sync = take if rank else WeightSender(given, [Broadcast(role.receivers)])
        found[case] = {"reports": syncs(sync, 1)}
    servers = Forgets()
    found["servers"] = (
        {"reports": syncs(ReceivedWeights(role.receivers, servers), 2), "names": servers.names}
        if rank
        else sent(role, FROZEN_TOWER, SERVERS)
    )
    torch.save(found, folder / str(rank))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("broadcast")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=PATIENCE)
    run_ranks(process, (store.port, folder), nprocs=2)
    learner, engine = (torch.load(folder / str(rank)) for rank in range(2))
    return learner, engine


@pytest.mark.parametrize("case", CASES)
def test_after_the_first_weight_sync_only_what_training_changes_travels(
    case: str, ends: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    learner, engine = (end[case] for end in ends)
    every = sum(weight.nbytes for weight in learner["weights"].values())
    assert [report["bytes_copied"] for report in learner["reports"]] == [every, learner["trained_bytes"]]
    assert 0 < learner["trained_bytes"] < every
    assert engine["reports"] == learner["reports"], "bytes, tensors and checksums of both ends"
    assert engine["weights"].keys() == learner["weights"].keys()
    assert all(torch.equal(engine["weights"][name], weight) for name, weight in learner["weights"].items())


def test_servers_get_all_weights_with_each_weight_sync(ends: tuple[dict[str, Any], dict[str, Any]]) -> None:
    learner, engine = (end["servers"] for end in ends)
    every = sum(weight.nbytes for weight in learner["weights"].values())
    assert [report["bytes_copied"] for report in engine["reports"]] == [every, every]
    assert engine["reports"] == learner["reports"]
    first, second = engine["names"]
    assert first == second


def test_an_engine_that_holds_something_else_than_was_sent_is_an_error(
    ends: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    learner, engine = (end["broken"]["reports"][0] for end in ends)
    assert engine.startswith("EngineError: the weight a differs between trainer and engine")
    assert "rank 1: the weight a differs" in learner


def test_other_names_are_refused_on_both_ends_before_anything_is_written(
    ends: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    learner, engine = (end["other names"]["reports"][0] for end in ends)
    assert "2 that were sent the engine does not have, first a" in engine
    assert "2 that were sent the engine does not have, first a" in learner
