"""Pushes into vLLM: all or nothing, checked before and after, adapters merged."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from fovea.cluster import engine_stream
from fovea.config.run import Config, Lora, Model
from fovea.errors import EngineError
from fovea.models.outgoing import outgoing_merged
from fovea.models.trainable import choose_trainable, lora_layers, trainable_parameters
from fovea.plan.plan import make_plan
from fovea.rollout.vllm.engine import VllmEngine
from fovea.rollout.vllm.worker import WeightReceiver
from fovea.utils.checksum import value_hash
from fovea.utils.event_loop import wait_for
from tests.rollout.engine_suite import TOLERANCE, Served, ask, prompts_of
from tests.rollout.vllm.serving import KV_CACHE_GIB, push, serving, start, stream
from tests.tiny_models import tiny


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving("qwen3_vl", tmp_path_factory.mktemp("weights") / "model") as made:
        yield made


Q_PROJ = "model.language_model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("partial", r"1 that vLLM needs were not sent, first .*q_proj\.weight; both must open the same model"),
        ("renamed", r"1 that vLLM needs were not sent, .*; 1 that were sent vLLM does not have, first .*q_proj\.wait"),
        ("reshaped", r"1 have another shape in vLLM, first .*q_proj\.weight is \[64, 32\] and not \[64, 64\]"),
    ],
)
def test_a_push_that_does_not_fit_is_refused_and_changes_nothing(served: Served, change: str, message: str) -> None:
    request = ask(f"refused/{change}", prompts_of(served.parts)[1], n=2)
    before = served.generate(request)[0]
    shapes = {weight.name: weight.shape for weight in outgoing_merged(served.parts.network)}
    if change == "reshaped":
        shapes[Q_PROJ] = (64, 32)
    else:
        taken = shapes.pop(Q_PROJ)
        shapes |= {Q_PROJ.replace("weight", "wait"): taken} if change == "renamed" else {}
    assert isinstance(served.engine, VllmEngine)
    with pytest.raises(EngineError, match=message):
        served.engine.begin_push(shapes)
    again = served.generate(request)[0]
    assert [c.version for c in again] == [c.version for c in before]
    assert served.largest_difference(request, again) < TOLERANCE


def test_a_later_push_brings_what_is_trained_and_no_half_of_a_fused_weight(served: Served) -> None:
    """Of a frozen tower nothing comes again; q without k and v is refused."""
    assert isinstance(served.engine, VllmEngine)
    parts, request = served.parts, ask("later", prompts_of(served.parts)[1], n=2)
    choose_trainable(parts.network, Model(path="x", freeze_vision_tower=True), seed=0)
    sync = stream(served.engine, parts)
    everything = wait_for(sync.push(20))
    with torch.no_grad():
        for weight in trainable_parameters(parts.network).values():
            weight.add_(torch.randn_like(weight) * 0.02)
    report = wait_for(sync.push(21))
    trained = trainable_parameters(parts.network).values()
    assert (report.num_tensors, report.bytes_copied) == (len(trained), sum(weight.nbytes for weight in trained))
    assert report.bytes_copied < everything.bytes_copied
    completions = served.generate(request)[0]
    assert {c.version for c in completions} == {21}
    assert served.largest_difference(request, completions) < TOLERANCE
    with pytest.raises(EngineError, match=r"2 that vLLM needs were not sent, first .*k_proj\.weight"):
        served.engine.begin_push({Q_PROJ: (64, 64)})


def test_a_push_that_breaks_off_leaves_an_engine_that_refuses_requests(served: Served) -> None:
    """Until one brings all weights again."""
    engine, weights = served.engine, list(outgoing_merged(served.parts.network))
    assert isinstance(engine, VllmEngine)
    engine.begin_push({weight.name: weight.shape for weight in weights})
    # amid a fused weight
    half = next(place for place, weight in enumerate(weights) if weight.name == Q_PROJ) + 1
    engine.take_weights([(weight.name, weight.tensor() + 1) for weight in weights[:half]])
    request = ask("broken off", prompts_of(served.parts)[1], n=2)
    with pytest.raises(EngineError, match="the last push of weights broke off and left weights of two versions"):
        served.generate(request)
    with pytest.raises(EngineError, match="that vLLM needs were not sent"):
        engine.begin_push({weight.name: weight.shape for weight in weights if "visual" not in weight.name})
    served.push(22)
    assert served.largest_difference(request, served.generate(request)[0]) < TOLERANCE


def test_no_more_than_a_bucket_is_kept_beside_the_weights(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_stream, "BUCKET_BYTES", 1)
    taken: list[int] = []
    take = VllmEngine.take_weights
    monkeypatch.setattr(
        VllmEngine, "take_weights", lambda self, bucket: (taken.append(len(bucket)), take(self, bucket))[1]
    )
    served.push(23)
    assert len(taken) > 20
    assert set(taken) == {1}


@pytest.mark.parametrize("leaf", ["self_attn.q_proj.weight", "mlp.up_proj.weight", "input_layernorm.weight"])
def test_other_values_in_vllm_than_were_sent_are_an_error(
    served: Served, leaf: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed and fused weights are read back too; one value of 4096 is changed on its way into the model."""
    take = WeightReceiver.take_weights

    def changed(name: str, weight: Tensor) -> Tensor:
        weight = weight.clone()
        weight.view(-1)[5] += 1e-3 * name.endswith(f"layers.1.{leaf}")
        return weight

    def damaging(self: WeightReceiver, weights: Sequence[tuple[str, Tensor]]) -> list[int]:
        take(self, [(name, changed(name, weight)) for name, weight in weights])
        return [value_hash(weight, torch.float32) for _, weight in weights]

    monkeypatch.setattr(WeightReceiver, "take_weights", damaging)
    with pytest.raises(EngineError, match=rf"1 weights differ between trainer and vLLM.*layers\.1\.{leaf}"):
        served.push(98)
    monkeypatch.undo()
    served.push(7)


def test_new_weights_while_requests_run_are_refused(served: Served) -> None:
    async def push_in_the_middle() -> None:
        drawing = asyncio.ensure_future(served.engine.generate(ask("running", prompts_of(served.parts)[0])))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="new weights came while the engine is generating"):
            served.push(8)
        await drawing

    wait_for(push_in_the_middle())


def test_without_a_push_a_request_is_refused_and_adapters_are_merged(tmp_path_factory: pytest.TempPathFactory) -> None:
    parts = tiny("qwen2_5_vl")
    # the files are those of the model without adapters
    engine = start(parts, tmp_path_factory.mktemp("lora") / "model")
    try:
        lora = Served(parts=parts, engine=engine, push=lambda version: None)
        request = ask("lora", prompts_of(parts)[2], n=2)
        with pytest.raises(EngineError, match="the engine has no weights; push them first"):
            lora.generate(request)
        choose_trainable(parts.network, Model(path="x", lora=Lora(rank=4, alpha=8)), seed=0)
        with torch.no_grad():
            for layer in lora_layers(parts.network).values():
                layer.lora_B["default"].weight.normal_(std=0.1)
        push(engine, parts, 1)
        assert lora.largest_difference(request, lora.generate(request)[0]) < TOLERANCE
    finally:
        wait_for(engine.close())


def test_a_plan_knows_the_tokens_of_the_cache(served: Served) -> None:
    """By the numbers that vLLM has made of `kv_cache_gib`; pages that do not fit whole are left out."""
    engine = served.engine
    assert isinstance(engine, VllmEngine)
    cache = engine.llm.vllm_config.cache_config
    assert cache.num_gpu_blocks is not None
    config = Config.model_validate(
        {
            "model": {"path": str(engine.llm.model_config.model)},
            "rollout": {"engine": {"name": "vllm", "kv_cache_gib": KV_CACHE_GIB}},
            "plan": {"gpu": "cpu", "gpus": 1},
        }
    )
    room = make_plan(config).room
    assert room is not None
    assert 0 <= room.cache_tokens - cache.num_gpu_blocks * cache.block_size < cache.block_size
