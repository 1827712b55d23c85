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
from fovea.weights.base import WeightSink
from fovea.weights.push import WeightPusher
from fovea.weights.sinks import NetworkCopy, SharedTensors
from tests.meta_device import META, NoPageableCopies

WEIGHTS = {f"layers.{layer}.weight": torch.ones(3, 600, device=META, requires_grad=True) for layer in range(20)}


class Engine:
    """With its own tensors, or as they come."""

    has_weights = False

    def own_weights(self) -> Weights:
        return [(name, torch.zeros_like(weight)) for name, weight in WEIGHTS.items()]

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None: ...

    def begin_push(self, shapes: Mapping[str, Shape]) -> None: ...

    def take_weights(self, bucket: Sequence[tuple[str, Tensor]]) -> None: ...

    def finish_push(self, version: int) -> None: ...


OUTGOING = [OutgoingWeight(name=name, parameter=weight) for name, weight in WEIGHTS.items()]
SINKS: Mapping[str, tuple[WeightSink, int]] = {
    "shared tensors": (SharedTensors(Engine()), 1),
    # the hashes of the copies are compared before they are used
    "an engine's own tensors": (NetworkCopy(Engine()), 2),
    "a stream of buckets": (Engine(), 1),
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


@pytest.mark.parametrize("sink", SINKS)
def test_a_push_reads_the_device_once_for_all_tensors(sink: str, reads: list[int]) -> None:
    made, times = SINKS[sink]
    wait_for(WeightPusher(lambda: OUTGOING, [made]).push(1))
    assert len(reads) == times
    assert min(reads) >= len(WEIGHTS), "a hash of every weight, at least"
