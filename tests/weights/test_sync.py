"""A weight sync: names, shapes and values on both sides, what is copied, and copies here and over a process group."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
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
from fovea.rollout.embedded.engine import EmbeddedEngine
from fovea.types import Completion, Sampling, Shape, Weights
from fovea.weights import sync as sync_module
from fovea.weights.base import SyncReport, WeightReceiver, WeightSync
from fovea.weights.broadcast import Broadcast, ReceivedWeights
from fovea.weights.sync import NetworkCopy, SharedWeights, WeightSender
from fovea.wiring.workers import make_weight_sender, make_worker
from fovea_gym.errors import FoveaError
from fovea_gym.utils.event_loop import wait_for
from gym_tests.tables import table
from tests.meta_device import META, NoPageableCopies
from tests.policies import make_batch, make_policy
from tests.process_ranks import PATIENCE, run_group
from tests.rollout.drawing import generate, make_engine, same
from tests.tiny_models import mixed_prompts, save, tiny
from tests.train.rank_policies import batch_of


class Engine:
    """An engine with tensors of these shapes and types."""

    def __init__(self, **own: Tensor) -> None:
        self.own = own
        self.version = -1

    def own_weights(self) -> Weights:
        return self.own.items()

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        self.own, self.version = dict(weights), version


def sender(receiver: WeightReceiver, trained: str = "ab") -> WeightSender:
    tensors = {"a": torch.linspace(0, 1, 4), "b": torch.arange(3.0)}
    weights = [WeightToSync(name=name, parameter=x.requires_grad_(name in trained)) for name, x in tensors.items()]
    return WeightSender(lambda: weights, [receiver])


def test_copies_are_counted_and_carry_the_version() -> None:
    engine = Engine(a=torch.zeros(4, dtype=torch.bfloat16), b=torch.zeros(3))
    sync = sender(NetworkCopy(engine), trained="b")
    for version, copied in ((7, (2, 7 * 4)), (8, (1, 3 * 4))):
        report = wait_for(sync.sync(version))
        assert (report.version, report.num_tensors, report.bytes_copied) == (version, *copied)
        assert engine.version == version
    assert torch.equal(engine.own["a"], torch.linspace(0, 1, 4).bfloat16()), "of the engine's type"


class LosesOne(NetworkCopy):
    """A receiver whose second weight sync fails at its end."""

    def finish_sync(self, version: int) -> None:
        super().finish_sync(version)
        if version == 1:
            raise EngineError("lost")


def test_the_weight_sync_after_one_that_failed_brings_all_weights_again() -> None:
    sync = sender(LosesOne(Engine(a=torch.zeros(4), b=torch.zeros(3))), trained="b")
    assert wait_for(sync.sync(0)).num_tensors == 2
    with pytest.raises(EngineError, match="lost"):
        wait_for(sync.sync(1))
    assert [wait_for(sync.sync(version)).num_tensors for version in (2, 3)] == [2, 1]


FOUR, HALF = torch.zeros(4), torch.zeros(4, dtype=torch.bfloat16)
"""Tensors that two weights share: as sent, and of a type to which they are converted."""
OVERWRITTEN = "the weight a differs between trainer and engine after it was copied"


@table(
    ("own", "error"),
    [
        ({"a": FOUR, "b": FOUR[:3]}, OVERWRITTEN),
        ({"a": HALF, "b": HALF[:3]}, OVERWRITTEN),
        ({"a": FOUR, "b": torch.zeros(3), "c": FOUR}, "1 that the engine needs were not sent, first c"),
        ({"a": FOUR}, "1 that were sent the engine does not have, first b"),
        (
            {"a": FOUR, "b": FOUR[:2]},
            r"1 have a different shape in the engine, first b has shape \[3\] instead of \[2\]",
        ),
    ],
)
def test_names_shapes_and_values_match_on_both_sides(own: dict[str, Tensor], error: str) -> None:
    engine = Engine(**own)
    with pytest.raises(EngineError, match=error):
        wait_for(sender(NetworkCopy(engine)).sync(0))
    assert engine.version == -1, "not loaded"


@pytest.mark.parametrize("lora", [False, True])
def test_an_engine_on_its_policys_tensors_draws_with_the_new_weights_and_gets_none(lora: bool) -> None:
    parts = tiny("qwen3_vl")
    choose_trainable(parts.network, Model(tiny=TinyModel(), lora=Lora(rank=4) if lora else None), seed=0)
    engine, policy = make_engine(parts), make_policy(parts, learning_rate=1e-2, lr_warmup_steps=0)
    prompts, seeded = mixed_prompts(parts), [Sampling(max_new_tokens=4, seed=3)] * 3
    before = generate(engine, prompts, seeded, 2)
    policy.update(make_batch(parts))
    report = wait_for(SharedWeights(engine).sync(1))
    assert report == SyncReport(version=1, num_tensors=0, bytes_copied=0)
    assert report.metrics() == {"transfer/weights_mib": 0.0}, "nothing was sent whose checksum two sides could compare"
    fresh = make_engine(parts)
    wait_for(SharedWeights(fresh).sync(1))
    after, expected = generate(engine, prompts, seeded, 2), generate(fresh, prompts, seeded, 2)
    assert {completion.version for group in after for completion in group} == {1}
    assert all(map(same, after, expected))
    assert not any(map(same, after, before))


class Stream:
    """An engine with its own weights, or a receiver of engines in other processes, which may be lost."""

    has_weights = False
    left: Sequence[int] = (1, 2)

    def __init__(self) -> None:
        self.names: list[list[str]] = []

    def leave_out_lost(self, left: Sequence[int]) -> None:
        self.left = left

    def begin_sync(self, shapes: Mapping[str, Shape]) -> None:
        self.names.append(list(shapes))

    def receive_weights(self, bucket: Sequence[tuple[str, Tensor]]) -> None: ...

    def finish_sync(self, version: int) -> None: ...


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Lengths of the tensors that the host has read; `item` and `int` remain errors on torch's meta device."""
    found: list[int] = []

    def zeros(tensor: Tensor) -> Any:
        found.append(len(tensor))
        return [0] * len(tensor)

    monkeypatch.setattr(Tensor, "tolist", zeros)
    with NoPageableCopies():
        yield found


def test_engines_elsewhere_get_the_tensors_before_the_engine_beside_the_policy_the_version() -> None:
    """One learner that generates, and engines in other processes."""
    copy, beside = Engine(a=torch.zeros(4), b=torch.zeros(3)), Engine(a=torch.ones(4), b=torch.ones(3))
    sync = SharedWeights(beside, sender(NetworkCopy(copy), trained="b"))
    for version, copied in ((0, (2, 7 * 4)), (1, (1, 3 * 4))):
        report = wait_for(sync.sync(version))
        assert (report.num_tensors, report.bytes_copied) == copied
        assert report.checksum is not None
        assert (copy.version, beside.version) == (version, version)
    assert torch.equal(copy.own["a"], torch.linspace(0, 1, 4))
    assert torch.equal(beside.own["a"], torch.ones(4)), "nothing is copied into the policy's tensors"


def test_an_engine_elsewhere_that_was_lost_is_left_out_beside_shared_weights() -> None:
    receiver = Stream()
    wait_for(SharedWeights(Engine(a=torch.zeros(1)), sender(receiver)).leave_out_lost([2]))
    assert receiver.left == [2]


def on_device() -> dict[str, Tensor]:
    return {f"layers.{layer}": torch.ones(3, 600, device=META, requires_grad=True) for layer in range(20)}


@pytest.mark.parametrize("receiver", [NetworkCopy, Stream])
def test_a_weight_sync_reads_the_device_once_for_all_tensors(receiver: Any, reads: list[int]) -> None:
    weights = on_device()
    engine = Engine(**{name: torch.zeros_like(weight) for name, weight in weights.items()})
    weights_to_sync = [WeightToSync(name=name, parameter=weight) for name, weight in weights.items()]
    wait_for(WeightSender(lambda: weights_to_sync, [receiver() if receiver is Stream else receiver(engine)]).sync(1))
    (read,) = reads
    assert read >= len(weights), "a hash of every weight, at least"


def test_a_weight_sync_of_shared_weights_never_waits_for_the_device(reads: list[int]) -> None:
    engine = Engine(**on_device())
    wait_for(SharedWeights(engine).sync(1))
    assert engine.version == 1
    assert not reads


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


def draw(engine: Any) -> Sequence[Completion]:
    groups = generate(engine, mixed_prompts(tiny("qwen3_vl")), [Sampling(max_new_tokens=8, seed=3)] * 3, n=2)
    return [completion for group in groups for completion in group]


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
    held = sum(weight.untyped_storage().nbytes() for weight in network.parameters())
    assert held == sum(weight.nbytes for weight in network.parameters()) - of_trained
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
    broken = Engine(a=FOUR, b=FOUR[:3])
    for case, target in (("other names", make_engine(tiny("qwen3_vl"))), ("broken", broken)):
        take = ReceivedWeights(group, NetworkCopy(target))
        found[case] = syncs(take if rank else sender(Broadcast(group)), 1)[0]
    assert broken.version == -1, "not loaded"
    servers = Stream()
    if rank:
        found["servers"] = {"reports": syncs(ReceivedWeights(group, servers), 2), "names": servers.names}
    else:
        found["servers"] = sent(Broadcast(group), CASES["frozen tower"], SERVERS)
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
