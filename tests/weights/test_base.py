"""A weight sync: names and shapes on both sides, copies equal bit for bit, what is copied, and waits for the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fovea.config.model import Lora, Model, TinyModel
from fovea.errors import EngineError
from fovea.models.trainable import choose_trainable
from fovea.models.weights_to_sync import WeightToSync
from fovea.types import Sampling, Shape, Weights
from fovea.weights.base import SyncReport, WeightReceiver
from fovea.weights.sync import NetworkCopy, SharedWeights, WeightSender
from fovea_gym.utils.event_loop import wait_for
from gym_tests.tables import table
from tests.meta_device import META, NoPageableCopies
from tests.policies import make_batch, make_policy
from tests.rollout.drawing import generate, make_engine, same
from tests.tiny_models import mixed_prompts, tiny


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

    def leave_out_lost(self, left: Sequence[int]) -> None:
        self.left = left

    def begin_sync(self, shapes: Mapping[str, Shape]) -> None: ...

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
