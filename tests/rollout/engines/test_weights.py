"""Syncs into the engine: all or nothing, checked before and after, adapters merged."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from fovea.config.model import Lora, Model
from fovea.errors import EngineError
from fovea.models.trainable import choose_trainable, lora_layers, trainable_parameters
from fovea.models.weights_to_sync import merged_weights_to_sync
from fovea.types import Shape
from fovea.weights import sync as sync_module
from fovea_gym.utils.event_loop import wait_for
from tests.rollout.drawing import noted
from tests.rollout.engine_suite import TOLERANCE, Served, ask, begun, check_draws, prompts_of, slow
from tests.rollout.engines.under_test import served_by, stream, tiny_for, under_test

Q_PROJ = "model.language_model.layers.0.self_attn.q_proj.weight"
TITLE = under_test().title
NOT_SENT = rf"1 that {TITLE} needs were not sent, first .*q_proj\.weight; both must load the same model"


@pytest.fixture
def served(shared: Any) -> Served:
    """With new weights, so that a test may do with them what it wants."""
    made = served_by(shared, tiny_for("qwen3_vl", num_kv_heads=2))
    made.sync(7)
    return made


def shapes_of(served: Served) -> dict[str, Shape]:
    return {weight.name: weight.shape for weight in merged_weights_to_sync(served.parts.network)}


def test_a_weight_sync_that_does_not_fit_is_refused_and_changes_nothing(served: Served) -> None:
    others, engine = shapes_of(served), cast(Any, served.engine)
    del others[Q_PROJ]
    for name, shape, message in (
        (Q_PROJ.replace("weight", "wait"), (64, 64), rf"1 that were sent {TITLE} does not have, first .*q_proj\.wait"),
        (
            Q_PROJ,
            (64, 32),
            rf"1 have a different shape in {TITLE}, .*q_proj\.weight .* \[64, 32\] instead of \[64, 64\]",
        ),
    ):
        with pytest.raises(EngineError, match=message):
            engine.begin_sync(others | {name: shape})
        check_draws(served, 7)


@pytest.mark.parametrize("tower", [True, False])
def test_a_later_weight_sync_brings_what_is_trained_and_all_is_new_afterwards(served: Served, tower: bool) -> None:
    """A frozen tower does not come again; of a trained one the engine would keep features of images."""
    network = served.parts.network
    for name, weight in network.named_parameters():
        weight.requires_grad_(tower == ("visual" in name))
    syncs = stream(served.engine, served.parts)
    everything = wait_for(syncs.sync(20))
    request = ask("later", prompts_of(served.parts)[2], n=2)
    before = served.generate(request)[0]
    trained = trainable_parameters(network).values()
    with torch.no_grad():
        for weight in trained:
            weight.add_(torch.randn_like(weight) * 0.05)
    report = wait_for(syncs.sync(21))
    assert (report.num_tensors, report.bytes_copied) == (len(trained), sum(weight.nbytes for weight in trained))
    assert report.bytes_copied < everything.bytes_copied
    check_draws(served, 21)
    after = served.generate(request)[0]
    assert abs(float(before[0].logprobs_T[0] - after[0].logprobs_T[0])) > 1e-3


def test_a_weight_sync_that_breaks_off_leaves_an_engine_that_refuses_requests(served: Served) -> None:
    """Until one brings all weights again."""
    engine: Any = served.engine
    weights = list(merged_weights_to_sync(served.parts.network))
    engine.begin_sync(shapes_of(served))
    # amid a fused weight
    half = next(place for place, weight in enumerate(weights) if weight.name == Q_PROJ) + 1
    engine.receive_weights([(weight.name, weight.tensor() + 1) for weight in weights[:half]])
    request = ask("broken off", prompts_of(served.parts)[1], n=2)
    with pytest.raises(EngineError, match="the last weight sync failed halfway and left weights of two versions"):
        served.generate(request)
    shapes = shapes_of(served)
    del shapes[Q_PROJ]
    with pytest.raises(EngineError, match=NOT_SENT):
        engine.begin_sync(shapes)
    served.sync(22)
    assert served.largest_difference(request, served.generate(request)[0]) < TOLERANCE


def test_no_more_than_a_bucket_is_kept_beside_the_weights(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync_module, "BUCKET_BYTES", 1)
    taken: list[int] = []
    noted(monkeypatch, served.engine, "receive_weights", lambda bucket: taken.append(len(bucket)))
    served.sync(23)
    assert taken == [1] * len(shapes_of(served))


@pytest.mark.parametrize("leaf", ["self_attn.q_proj.weight", "mlp.up_proj.weight", "input_layernorm.weight"])
def test_other_values_in_the_engine_than_were_sent_are_an_error(
    served: Served, leaf: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One value of 4096 is changed on its way into the model; without all weights the engine then draws nothing."""
    under_test().damage(monkeypatch, f"layers.1.{leaf}")
    with pytest.raises(EngineError, match=rf"1 weights differ between trainer and {TITLE}.*layers\.1\.{leaf}"):
        served.sync(98)
    with pytest.raises(EngineError, match="the last weight sync failed halfway"):
        served.generate(ask("damaged", prompts_of(served.parts)[0]))


def test_new_weights_while_requests_run_are_refused(served: Served) -> None:
    engine: Any = served.engine

    async def sync_in_the_middle() -> None:
        drawing = await begun(engine, slow("running", prompts_of(served.parts)[0]))
        with pytest.raises(EngineError, match="new weights"):
            engine.begin_sync(shapes_of(served))
        await drawing

    wait_for(sync_in_the_middle())


def test_adapters_are_merged(served: Served) -> None:
    """The engine was started from the files of the model without adapters."""
    choose_trainable(served.parts.network, Model(path="x", lora=Lora(rank=4, alpha=8)), seed=0)
    with torch.no_grad():
        for layer in lora_layers(served.parts.network).values():
            layer.lora_B["default"].weight.normal_(std=0.1)
    served.sync(9)
    check_draws(served, 9)
