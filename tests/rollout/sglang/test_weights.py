"""Pushes into SGLang: all or nothing, checked before and after, adapters merged. The order of the tests counts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor, nn

from fovea.config.run import Lora, Model
from fovea.errors import EngineError
from fovea.models.trainable import choose_trainable, lora_layers
from fovea.rollout.sglang import engine as engine_module
from fovea.rollout.sglang import weights as weights_module
from fovea.rollout.sglang.engine import SglangEngine
from fovea.rollout.sglang.scheduler import differences
from fovea.rollout.sglang.weights import Sent
from fovea.types import Shape
from fovea.utils.checksum import value_hash
from fovea.utils.event_loop import wait_for
from tests.rollout.engine_suite import TOLERANCE, Served, ask, prompts_of
from tests.rollout.sglang.serving import push, start, stream
from tests.tiny_models import tiny

Q_PROJ = "model.language_model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def unpushed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    parts = tiny("qwen3_vl")
    engine = start(parts, tmp_path_factory.mktemp("weights") / "model")
    try:
        yield Served(parts=parts, engine=engine, push=lambda version: push(engine, parts, version))
    finally:
        wait_for(engine.close())


@pytest.fixture
def served(unpushed: Served) -> Served:
    unpushed.push(7)
    return unpushed


def engine_of(served: Served) -> SglangEngine:
    assert isinstance(served.engine, SglangEngine)
    return served.engine


def shapes_of(served: Served) -> dict[str, Shape]:
    return {name: tuple(weight.shape) for name, weight in served.parts.network.named_parameters()}


def test_without_a_push_a_request_is_refused_and_a_part_of_the_weights_too(unpushed: Served) -> None:
    with pytest.raises(EngineError, match="the engine has no weights; push them first"):
        unpushed.generate(ask("early", prompts_of(unpushed.parts)[0]))
    some = shapes_of(unpushed)
    del some[Q_PROJ]
    with pytest.raises(EngineError, match=r"1 that SGLang needs were not sent, first .*q_proj\.weight; both must open"):
        engine_of(unpushed).begin_push(some)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("renamed", r"1 that were sent SGLang does not have, first .*q_proj\.wait"),
        ("reshaped", r"1 have another shape in SGLang, first .*q_proj\.weight is \[64, 32\] and not \[64, 64\]"),
    ],
)
def test_a_push_that_does_not_fit_is_refused_and_changes_nothing(served: Served, change: str, message: str) -> None:
    request = ask(f"refused/{change}", prompts_of(served.parts)[1], n=2)
    shapes = shapes_of(served)
    shapes |= {Q_PROJ: (64, 32)} if change == "reshaped" else {Q_PROJ.replace("weight", "wait"): shapes.pop(Q_PROJ)}
    with pytest.raises(EngineError, match=message):
        engine_of(served).begin_push(shapes)
    again = served.generate(request)[0]
    assert [c.version for c in again] == [7, 7]
    assert served.largest_difference(request, again) < TOLERANCE


@pytest.mark.parametrize("leaf", ["self_attn.k_proj.weight", "mlp.up_proj.weight", "input_layernorm.weight"])
def test_other_values_in_sglang_than_were_sent_are_an_error(
    served: Served, leaf: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One value is changed on its way; without all weights the engine then draws nothing."""
    handles = weights_module.handles

    def damaged(tensors: Sequence[tuple[str, Tensor]]) -> bytes:
        copies = [(name, tensor.clone()) for name, tensor in tensors]
        for name, tensor in copies:
            tensor.view(-1)[5] += 1e-3 * name.endswith(f"layers.1.{leaf}")
        return handles(copies)

    monkeypatch.setattr(weights_module, "handles", damaged)
    with pytest.raises(EngineError, match=rf"1 weights differ between trainer and SGLang.*layers\.1\.{leaf}"):
        served.push(98)
    with pytest.raises(EngineError, match="the last push of weights broke off"):
        served.generate(ask("damaged", prompts_of(served.parts)[0]))
    monkeypatch.undo()


def test_a_later_push_may_bring_some_weights_and_all_are_new_afterwards(served: Served) -> None:
    """With a trained tower, whose features SGLang would keep by itself."""
    network = served.parts.network.requires_grad_(False)
    tower = [weight for name, weight in network.named_parameters() if "visual" in name]
    pushes = stream(engine_of(served), served.parts)
    wait_for(pushes.push(8))
    request = ask("tower", prompts_of(served.parts)[2], n=2)
    before = served.generate(request)[0]
    for weight in tower:
        weight.requires_grad_()
        with torch.no_grad():
            weight.add_(torch.randn_like(weight) * 0.05)
    assert wait_for(pushes.push(9)).num_tensors == len(tower)
    after = served.generate(request)[0]
    assert served.largest_difference(request, after) < TOLERANCE
    assert abs(float(before[0].logprobs_T[0] - after[0].logprobs_T[0])) > 1e-3


def test_new_weights_while_requests_run_are_refused(served: Served) -> None:
    async def push_in_the_middle() -> None:
        drawing = asyncio.ensure_future(served.engine.generate(ask("running", prompts_of(served.parts)[0])))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="new weights came while the engine is generating"):
            engine_of(served).begin_push(shapes_of(served))
        await drawing

    wait_for(push_in_the_middle())


def test_adapters_are_merged(served: Served) -> None:
    choose_trainable(served.parts.network, Model(path="x", lora=Lora(rank=4, alpha=8)), seed=0)
    with torch.no_grad():
        for layer in lora_layers(served.parts.network).values():
            layer.lora_B["default"].weight.normal_(std=0.1)
    served.push(9)
    request = ask("lora", prompts_of(served.parts)[2], n=2)
    assert served.largest_difference(request, served.generate(request)[0]) < TOLERANCE


@pytest.mark.parametrize(("shape", "is_compared"), [((4, 2), False), ((2, 4), False), ((4, 4), True), ((6, 4), True)])
def test_the_parameters_of_a_worker_that_are_not_sharded_are_compared(
    shape: tuple[int, int], is_compared: bool
) -> None:
    """Several workers share a weight by rows or by columns; an embedding has rows that were not sent."""
    model, weight = nn.Module(), torch.arange(16.0).view(4, 4)
    model.o_proj = nn.Linear(*reversed(shape), bias=False)
    nn.init.zeros_(model.o_proj.weight)
    sent = {"o_proj.weight": Sent(4, 16, value_hash(weight, torch.float32))}
    assert bool(differences(model, sent, torch.float32)) == is_compared
    if is_compared:
        model.o_proj.weight.data[:4] = weight
        assert differences(model, sent, torch.float32) == ""


def test_a_push_waits_for_requests_that_were_cancelled_and_not_for_ever(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A paused engine does not end them."""
    monkeypatch.setattr(engine_module, "ABORT_SECONDS", 0.5)
    engine = engine_of(served)

    async def cancel_while_paused() -> None:
        await engine.pause()
        drawing = asyncio.ensure_future(engine.generate(ask("cancelled", prompts_of(served.parts)[0])))
        await asyncio.sleep(0.2)
        drawing.cancel()
        await asyncio.wait([drawing])
        with pytest.raises(EngineError, match="has not ended 1 requests that were cancelled"):
            engine.begin_push(shapes_of(served))
        await engine.resume()

    wait_for(cancel_while_paused())
    monkeypatch.undo()
    served.push(11)
