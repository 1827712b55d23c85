"""A push: names and shapes on both sides, copies that arrive bit for bit, and what is copied at all."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from fovea.config.model import Lora, Model, TinyModel
from fovea.errors import EngineError
from fovea.models.outgoing import OutgoingWeight
from fovea.models.trainable import choose_trainable
from fovea.types import Sampling, Weights
from fovea.utils.event_loop import wait_for
from fovea.weights.base import WeightSink
from fovea.weights.push import WeightPusher
from fovea.weights.sinks import NetworkCopy, SharedTensors
from tests.policies import make_policy, shared_weights
from tests.rollout.drawing import generate, make_engine
from tests.tiny_models import mixed_prompts, tiny


class Engine:
    """An engine with tensors of these types."""

    def __init__(self, *own: Tensor) -> None:
        self.own = dict(zip("ab", own, strict=True))
        self.version = -1

    def own_weights(self) -> Weights:
        return self.own.items()

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        self.own, self.version = dict(weights), version


def pusher(sink: WeightSink, trained: str = "ab") -> WeightPusher:
    tensors = {"a": torch.linspace(0, 1, 4), "b": torch.arange(3.0)}
    weights = [OutgoingWeight(name=name, parameter=x.requires_grad_(name in trained)) for name, x in tensors.items()]
    return WeightPusher(lambda: weights, [sink])


def test_copies_are_counted_and_carry_the_version() -> None:
    engine = Engine(torch.zeros(4, dtype=torch.bfloat16), torch.zeros(3))
    push = pusher(NetworkCopy(engine), trained="b")
    for version, num_tensors, num_bytes in ((7, 2, 7 * 4), (8, 1, 3 * 4)):
        report = wait_for(push.push(version))
        assert (report.version, report.num_tensors, report.bytes_copied) == (version, num_tensors, num_bytes)
        assert engine.version == version
    assert torch.equal(engine.own["a"], torch.linspace(0, 1, 4).bfloat16()), "of the engine's type"


def test_a_weight_that_is_overwritten_on_arrival_is_named() -> None:
    both = torch.zeros(4)
    engine = Engine(both, both[:3])
    with pytest.raises(EngineError, match="the weight a differs between trainer and engine after it was copied"):
        wait_for(pusher(NetworkCopy(engine)).push(0))
    assert engine.version == -1, "not loaded"


@pytest.mark.parametrize("sink", [SharedTensors, NetworkCopy])
@pytest.mark.parametrize(
    ("names", "shape", "error"),
    [
        ("abc", 3, "1 that the engine needs were not sent, first c"),
        ("a", 3, "1 that were sent the engine does not have, first b"),
        ("ab", 2, r"1 have another shape in the engine, first b is \[3\] and not \[2\]"),
    ],
)
def test_names_and_shapes_match_on_both_sides(sink: type[NetworkCopy], names: str, shape: int, error: str) -> None:
    engine = Engine(torch.zeros(4), torch.zeros(shape))
    engine.own = {name: engine.own.get(name, torch.zeros(1)) for name in names}
    with pytest.raises(EngineError, match=error):
        wait_for(pusher(sink(engine)).push(0))
    assert engine.version == -1


@pytest.mark.parametrize("lora", [False, True])
def test_an_engine_beside_its_policy_shares_all_weights(lora: bool) -> None:
    parts = tiny("qwen3_vl")
    choose_trainable(parts.network, Model(tiny=TinyModel(), lora=Lora(rank=4) if lora else None), seed=0)
    engine, policy = make_engine(parts), make_policy(parts)
    report = wait_for(shared_weights(policy, engine).push(1))
    assert report.num_tensors == len(dict(engine.own_weights()))
    assert report.bytes_copied == 0, "references only"
    ((completion,),) = generate(engine, mixed_prompts(parts)[:1], [Sampling(max_new_tokens=2)], 1)
    assert completion.version == 1
