"""Syncs into SGLang alone: its schedulers compare weights, and requests that were cancelled end first."""

from __future__ import annotations

import asyncio

import pytest
import torch
from torch import nn

from fovea.errors import EngineError
from fovea.rollout.sglang import engine as engine_module
from fovea.rollout.sglang.engine import SglangEngine
from fovea.rollout.sglang.scheduler import differences
from fovea.rollout.sglang.weights import Sent
from fovea.utils.checksum import value_hash
from fovea_gym.utils.event_loop import wait_for
from tests.rollout.engine_suite import prompts_of, slow
from tests.rollout.engines.serving import sync, tiny_for


@pytest.mark.parametrize(("shape", "is_compared"), [((4, 2), False), ((2, 4), False), ((4, 4), True), ((6, 4), True)])
def test_the_parameters_of_a_worker_that_are_not_sharded_are_compared(
    shape: tuple[int, int], is_compared: bool
) -> None:
    """Several workers share a weight by rows or by columns; an embedding has rows that were not sent."""
    model, weight = nn.Module(), torch.arange(16.0).view(4, 4)
    model.o_proj = nn.Linear(*reversed(shape), bias=False)
    nn.init.zeros_(model.o_proj.weight)
    sent = {"o_proj.weight": Sent(4, 16, int(value_hash(weight, torch.float32)))}
    assert bool(differences(model, sent, torch.float32)) == is_compared
    if is_compared:
        model.o_proj.weight.data[:4] = weight
        assert differences(model, sent, torch.float32) == ""


def test_a_weight_sync_waits_for_requests_that_were_cancelled_and_not_for_ever(
    shared: SglangEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "ABORT_SECONDS", 0.0)
    parts = tiny_for("qwen3_vl", num_kv_heads=2)
    sync(shared, parts, 7)
    shapes = {name: tuple(weight.shape) for name, weight in parts.network.named_parameters()}

    async def cancel() -> None:
        drawing = asyncio.ensure_future(shared.generate(slow("cancelled", prompts_of(parts)[0])))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        drawing.cancel()
        await asyncio.wait([drawing])
        with pytest.raises(EngineError, match="has not ended 1 cancelled requests"):
            shared.begin_sync(shapes)

    wait_for(cancel())
    monkeypatch.undo()
    sync(shared, parts, 11)
