"""How often a push makes the host wait for the device: here on torch's meta device (`tests.meta_device`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fovea.models.outgoing import OutgoingWeight
from fovea.types import Shape, Weights
from fovea.utils.event_loop import wait_for
from fovea.weights.base import WeightSync
from fovea.weights.broadcast import StreamedWeights
from fovea.weights.local import SharedWeights, call_here
from fovea.weights.to_engine import EngineCopy, EngineStream, WeightTaker
from tests.meta_device import META, NoPageableCopies

WEIGHTS = {f"layers.{layer}.weight": torch.ones(3, 600, device=META, requires_grad=True) for layer in range(20)}


class Policy:
    def weights(self) -> Weights:
        return WEIGHTS.items()


class Engine:
    """With its own tensors, or as they come."""

    weight_names = frozenset(WEIGHTS)
    has_weights = False

    def own_weights(self) -> Weights:
        return [(name, torch.zeros_like(weight)) for name, weight in WEIGHTS.items()]

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> Mapping[str, Tensor]:
        return weights

    def begin_push(self, shapes: Mapping[str, Shape]) -> None: ...

    def take_weights(self, bucket: Sequence[tuple[str, Tensor]]) -> None: ...

    def finish_push(self, version: int) -> None: ...


def streamed(taker: WeightTaker) -> StreamedWeights:
    outgoing = [OutgoingWeight(name=name, parameter=weight) for name, weight in WEIGHTS.items()]
    return StreamedWeights(lambda: outgoing, torch.float32, [taker], call_here)


SYNCS: Mapping[str, WeightSync] = {
    "shared tensors": SharedWeights(Policy(), Engine()),
    "an engine's own tensors": streamed(EngineCopy(Engine())),
    "a stream of buckets": streamed(EngineStream(Engine())),
}


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Lengths of the tensors that the host has read; `item` and `int` remain errors on this device."""
    found: list[int] = []

    def zeros(tensor: Tensor) -> Any:
        found.append(len(tensor))
        return [0] * len(tensor)

    monkeypatch.setattr(Tensor, "tolist", zeros)
    with NoPageableCopies():
        yield found


@pytest.mark.parametrize("sync", SYNCS)
def test_a_push_reads_the_device_once(sync: str, reads: list[int]) -> None:
    wait_for(SYNCS[sync].push(1))
    assert len(reads) == 1
    assert reads[0] >= len(WEIGHTS), "a hash of every weight, at least"
