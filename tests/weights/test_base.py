"""A push: names on both sides, copies that arrive bit for bit, and what is copied at all."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from fovea.config.model import Lora, Model, TinyModel
from fovea.errors import EngineError
from fovea.models.trainable import choose_trainable
from fovea.types import Sampling, Weights
from fovea.utils.event_loop import wait_for
from fovea.weights.base import check_copies, check_names
from fovea.weights.local import SharedWeights
from tests.policies import make_policy
from tests.rollout.drawing import generate, make_engine
from tests.tiny_models import mixed_prompts, tiny


class Given:
    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = weights

    def weights(self) -> Weights:
        return self._weights.items()


class Copies:
    """An engine in memory of its own, which may lose a bit on the way."""

    def __init__(self, names: frozenset[str], *, broken: bool = False) -> None:
        self.weight_names = names
        self.version = -1
        self._broken = broken

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> Mapping[str, Tensor]:
        held = {name: tensor.clone() for name, tensor in weights.items()}
        if self._broken:
            held["b"][0] += 1e-3
        self.version = version
        return held


TWO = {"a": torch.ones(4), "b": torch.arange(3.0)}


def test_copies_are_counted_and_carry_the_version() -> None:
    engine = Copies(frozenset(TWO))
    report = wait_for(SharedWeights(Given(TWO), engine).push(7))
    assert (report.version, report.num_tensors, report.bytes_copied, engine.version) == (7, 2, 7 * 4, 7)


def test_a_weight_that_arrives_differently_is_named() -> None:
    with pytest.raises(EngineError, match="the weight b differs between trainer and engine after it was copied"):
        wait_for(SharedWeights(Given(TWO), Copies(frozenset(TWO), broken=True)).push(0))


@pytest.mark.parametrize(
    ("sent", "wanted", "said"),
    [
        (["a"], ["a", "b"], "1 that the engine needs were not sent, first b"),
        (["a", "c"], ["a"], "1 that were sent the engine does not have, first c"),
    ],
)
def test_names_match_on_both_sides(sent: list[str], wanted: list[str], said: str) -> None:
    with pytest.raises(EngineError, match=said):
        check_names(sent, wanted)
    check_names(wanted, wanted)


def test_a_change_of_type_is_compared_after_rounding() -> None:
    sent = {"a": torch.linspace(0, 1, 10)}
    assert check_copies(sent, {"a": sent["a"].bfloat16()}) == 40


@pytest.mark.parametrize("lora", [False, True])
def test_an_engine_beside_its_policy_shares_all_weights(lora: bool) -> None:
    parts = tiny("qwen3_vl")
    choose_trainable(parts.network, Model(tiny=TinyModel(), lora=Lora(rank=4) if lora else None), seed=0)
    engine, policy = make_engine(parts), make_policy(parts)
    report = wait_for(SharedWeights(policy, engine).push(1))
    assert report.num_tensors == len(engine.weight_names)
    assert report.bytes_copied == 0, "references only"
    ((completion,),) = generate(engine, mixed_prompts(parts)[:1], [Sampling(max_new_tokens=2)], 1)
    assert completion.version == 1
