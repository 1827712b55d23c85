"""Weights of a policy in the engine's own copy, in this process and over a real process group."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from benchmarks.torch_memory import live_bytes
from fovea.advantages import with_advantages
from fovea.cluster.placement import Placement, Role
from fovea.config.model import Lora, Model, TinyModel
from fovea.config.run import Config
from fovea.errors import EngineError
from fovea.models.trainable import choose_trainable, factored_weights, trainable_parameters
from fovea.models.vlm import VLM
from fovea.models.weights_to_sync import WeightToSync, weights_to_sync
from fovea.rollout.base import Engine
from fovea.rollout.embedded.engine import EmbeddedEngine
from fovea.types import Completion, Request, Sampling, Shape, Weights
from fovea.weights import sync as sync_module
from fovea.weights.base import WeightSync
from fovea.weights.broadcast import Broadcast, ReceivedWeights
from fovea.weights.sync import NetworkCopy, WeightSender
from fovea.wiring.workers import make_weight_sender, make_worker
from fovea_gym.errors import FoveaError
from fovea_gym.utils.event_loop import wait_for
from tests.policies import make_policy
from tests.process_ranks import PATIENCE, run_group
from tests.rollout.drawing import make_engine, same
from tests.tiny_models import mixed_prompts, save, tiny
from tests.train.rank_policies import batch_of

CASES = {
    "all weights": Model(tiny=TinyModel()),
    "frozen tower": Model(tiny=TinyModel(), freeze_vision_tower=True),
    "lora": Model(tiny=TinyModel(), lora=Lora(rank=4)),
}
EMBEDDED = Config.model_validate({"model": {"tiny": {}}})
SERVERS = Config.model_validate(
    {
        "model": {"tiny": {}},
        "rollout": {"engine": {"name": "vllm_servers", "servers": ["http://127.0.0.1:8000"], "weights_dir": "weights"}},
    }
)


def draw(engine: Engine) -> Sequence[Completion]:
    sampling = Sampling(max_new_tokens=8, seed=3)
    prompts = enumerate(mixed_prompts(tiny("qwen3_vl")))
    requests = [Request(id=str(i), prompt=prompt, sampling=sampling, n=2) for i, prompt in prompts]
    return [completion for request in requests for completion in wait_for(engine.generate(request))]


class Copied(NamedTuple):
    """A policy's network, the engine's copy of it, the engine, and the weight syncs from one to the other."""

    trained: torch.nn.Module
    network: torch.nn.Module
    engine: EmbeddedEngine
    sync: WeightSender


def copied(settings: Model) -> Copied:
    """Both ends after a first weight sync."""
    parts = tiny("qwen3_vl")
    choose_trainable(parts.network, settings, seed=0)
    network = copy.deepcopy(parts.network).requires_grad_(False)
    synced = [each.name for each in weights_to_sync(parts.network) if each.is_trained]
    vlm = VLM(network, parts.processor.banned_ids)
    engine = EmbeddedEngine(vlm, parts.processor, max_batch_tokens=10_000, synced=synced)
    sync = WeightSender(make_policy(parts).weights_to_sync, [NetworkCopy(engine)])
    wait_for(sync.sync(0))
    return Copied(parts.network, network, engine, sync)


@pytest.mark.parametrize("case", CASES)
def test_a_sleeping_copy_holds_only_what_no_weight_sync_brings(case: str) -> None:
    trained, network, engine, sync = copied(CASES[case])
    before = draw(engine)
    of_trained = sum(weight.nbytes for weight in trainable_parameters(trained).values())
    awake = live_bytes()
    wait_for(engine.sleep())
    assert live_bytes() <= awake - of_trained, "and the key-value cache"
    assert sum(weight.untyped_storage().nbytes() for weight in network.parameters()) == (
        sum(weight.nbytes for weight in network.parameters()) - of_trained
    )
    assert wait_for(sync.sync(1)).bytes_copied == of_trained, "a sleep costs no more transfers"
    wait_for(engine.wake())
    assert same(draw(engine), before)


def test_a_copy_draws_with_what_the_weight_sync_after_its_sleep_brought_and_not_without_it() -> None:
    trained, network, engine, sync = copied(CASES["all weights"])
    before = draw(engine)
    wait_for(engine.sleep())
    with pytest.raises(EngineError, match="the weights that sleep freed were sent; run a weight sync first"):
        wait_for(engine.wake())
    with pytest.raises(EngineError, match="asleep; call wake first"):
        draw(engine)
    with torch.no_grad():
        for weight in trained.parameters():
            weight.mul_(1.5)
    wait_for(sync.sync(1))
    wait_for(engine.wake())
    held = dict(factored_weights(network))
    assert all(torch.equal(held[name], weight) for name, weight in factored_weights(trained))
    after = draw(engine)
    assert {completion.version for completion in after} == {1}
    assert not same(after, before)


def sleeping_worker(rank: int, model: Path, folder: Path) -> None:
    """A worker of two that train and generate: bytes of its tensors, and completions, around an update."""
    settings: dict[str, Any] = {"path": str(model), "device": "cpu", "freeze_vision_tower": False}
    config = Config.model_validate({"model": settings, "train": {"learning_rate": 1e-3}})
    role = Role.of(Placement(num_learners=2, num_engines_only=0, learners_generate=True), "cpu", PATIENCE)
    worker = make_worker(config, config.model, tiny("qwen3_vl").processor, role)
    assert worker.policy is not None
    assert worker.engine is not None
    wait_for(worker.weight_sync.sync(0))
    found: dict[str, Any] = {"awake": live_bytes(), "drawn": draw(worker.engine)}
    wait_for(worker.engine.sleep())
    found["asleep"] = live_bytes()
    batch, _ = with_advantages(batch_of(0), config.algorithm, 0.0)
    wait_for(worker.policy.update(batch))
    wait_for(worker.weight_sync.sync(1))
    wait_for(worker.engine.wake())
    found["drawn after"] = draw(worker.engine)
    torch.save(found, folder / str(rank))


def test_the_engines_of_ranks_that_train_sleep_without_weights(tmp_path: Path) -> None:
    parts = tiny("qwen3_vl")
    run_group(sleeping_worker, save(parts, tmp_path / "model"), tmp_path)
    first, second = (torch.load(tmp_path / str(rank), weights_only=False) for rank in range(2))
    weights = sum(weight.nbytes for weight in parts.network.parameters())
    for found in (first, second):
        assert found["awake"] - found["asleep"] == pytest.approx(weights, rel=0.02)
        assert {completion.version for completion in found["drawn after"]} == {1}
    assert same(first["drawn"], second["drawn"])
    assert same(first["drawn after"], second["drawn after"])
    assert not same(first["drawn after"], first["drawn"])


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


def a_and_b() -> list[WeightToSync]:
    tensors = {"a": torch.ones(4), "b": torch.arange(4.0)}
    return [WeightToSync(name=name, parameter=tensor) for name, tensor in tensors.items()]


def syncs(sync: WeightSync, number: int) -> list[Any]:
    """Reports of so many syncs, or the error of one."""
    try:
        return [asdict(wait_for(sync.sync(version))) for version in range(number)]
    except FoveaError as error:
        return [f"{type(error).__name__}: {error}"]


def sent(broadcast: Broadcast, settings: Model, run: Config = EMBEDDED) -> dict[str, Any]:
    """Two syncs of a policy, between which training changes its weights."""
    parts = tiny("qwen3_vl")
    choose_trainable(parts.network, settings, seed=0)
    sync = make_weight_sender(run, make_policy(parts), [broadcast])
    reports = syncs(sync, 1)
    trained = trainable_parameters(parts.network).values()
    with torch.no_grad():
        for weight in trained:
            weight.add_(0.5)
    reports += [asdict(wait_for(sync.sync(1)))]
    trained_bytes = sum(weight.nbytes for weight in trained)
    return {"reports": reports, "weights": dict(factored_weights(parts.network)), "trained_bytes": trained_bytes}


def learner_or_engine(rank: int, folder: Path) -> None:
    """Rank 0 is a learner, rank 1 an engine alone, which begins with other weights."""
    sync_module.BUCKET_BYTES = 10_000  # several buckets, and tensors larger than one
    role = Role.of(Placement(num_learners=1, num_engines_only=1, learners_generate=False), "cpu", PATIENCE)
    assert role.receivers is not None
    group, found = role.receivers, dict[str, Any]()
    for case in ("frozen tower", "lora"):
        if rank:
            parts = tiny("qwen3_vl")
            choose_trainable(parts.network, CASES[case], seed=0)
            parts.network.requires_grad_(False)
            for weight in parts.network.parameters():
                weight.add_(1.0)
            reports = syncs(ReceivedWeights(group, NetworkCopy(make_engine(parts))), 2)
            found[case] = {"reports": reports, "weights": dict(factored_weights(parts.network))}
        else:
            found[case] = sent(Broadcast(group), CASES[case])
    for case, target in (("other names", make_engine(tiny("qwen3_vl"))), ("broken", TwoNamesOfOneTensor())):
        take = ReceivedWeights(group, NetworkCopy(target))
        found[case] = syncs(take if rank else WeightSender(a_and_b, [Broadcast(group)]), 1)[0]
    servers = Forgets()
    found["servers"] = (
        {"reports": syncs(ReceivedWeights(group, servers), 2), "names": servers.names}
        if rank
        else sent(Broadcast(group), CASES["frozen tower"], SERVERS)
    )
    torch.save(found, folder / str(rank))


Ends = tuple[dict[str, Any], dict[str, Any]]


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    folder = tmp_path_factory.mktemp("broadcast")
    run_group(learner_or_engine, folder)
    return torch.load(folder / "0"), torch.load(folder / "1")


@pytest.mark.parametrize("case", ["frozen tower", "lora"])
def test_after_the_first_weight_sync_only_what_training_changes_travels(case: str, ends: Ends) -> None:
    learner, engine = (end[case] for end in ends)
    every = sum(weight.nbytes for weight in learner["weights"].values())
    assert [report["bytes_copied"] for report in learner["reports"]] == [every, learner["trained_bytes"]]
    assert 0 < learner["trained_bytes"] < every
    assert engine["reports"] == learner["reports"], "bytes, tensors and checksums of both ends"
    assert engine["weights"].keys() == learner["weights"].keys()
    assert all(torch.equal(engine["weights"][name], weight) for name, weight in learner["weights"].items())


def test_servers_get_all_weights_with_each_weight_sync(ends: Ends) -> None:
    learner, engine = (end["servers"] for end in ends)
    every = sum(weight.nbytes for weight in learner["weights"].values())
    assert [report["bytes_copied"] for report in engine["reports"]] == [every, every]
    assert engine["reports"] == learner["reports"]
    assert engine["names"][0] == engine["names"][1]


def test_other_names_and_other_values_are_errors_on_both_ends(ends: Ends) -> None:
    """Other names before anything is written; an engine that holds something else than was sent."""
    assert all("2 that were sent the engine does not have, first a" in end["other names"] for end in ends)
    learner, engine = (end["broken"] for end in ends)
    assert engine.startswith("EngineError: the weight a differs between trainer and engine")
    assert "rank 1: the weight a differs" in learner
