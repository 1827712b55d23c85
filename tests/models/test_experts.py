"""The mixture of experts against transformers' own block, alone and in a model whose layers do not all have one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Qwen3VLMoeTextConfig
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeTextSparseMoeBlock

from fovea.config.model import Lora, Model, TinyModel
from fovea.errors import ModelError
from fovea.models.decoder import ExpertLoad, LayerCall, imbalance
from fovea.models.experts import Experts, route
from fovea.models.kernels import silu_times
from fovea.models.plain import PlainVLM
from fovea.models.rope import Rope
from fovea.models.trainable import choose_trainable, trainable_parameters
from fovea.models.vlm import VLM
from fovea_gym.errors import ConfigError
from tests.reference import gradients, largest_relative_difference, of_row, reference_logprobs, row_of, vlm_of
from tests.rollout.drawing import LOGPROB_TOLERANCE, generate, make_engine, seeded
from tests.tiny_models import image, random_completions, renderer, tiny, user, with_dense_layer

WIDTH, NUM_EXPERTS, PER_TOKEN = 24, 8, 3
TOLERANCE = 1e-5
Run = Callable[[Experts, Tensor], Tensor]


def block(dtype: torch.dtype = torch.float32) -> Any:
    config = Qwen3VLMoeTextConfig(
        hidden_size=WIDTH, moe_intermediate_size=16, num_experts=NUM_EXPERTS, num_experts_per_tok=PER_TOKEN
    )
    config._experts_implementation = "eager"
    module = Qwen3VLMoeTextSparseMoeBlock(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.3, generator=generator)
    return module.to(dtype)


def experts_of(module: Any) -> Experts:
    return Experts(
        router_XE=module.gate.weight,
        gate_up_XGE=module.experts.gate_up_proj,
        down_XEF=module.experts.down_proj,
        per_token=PER_TOKEN,
    )


def test_sizes_that_the_grouped_product_refuses_are_named() -> None:
    parts = tiny("qwen3_vl_moe", intermediate_size=90)
    row = row_of(parts, [(3,)], [renderer(parts).prompt(user("x"))])
    message = r"hidden_size=64 and moe_intermediate_size=90 in torch\.float32: .* a multiple of 16 bytes; choose"
    with pytest.raises(ModelError, match=message):
        vlm_of(parts)(row, temperature=1.0, chunk_tokens=100)


def grouped(experts: Experts, x_NE: Tensor) -> Tensor:
    return experts.run_grouped(x_NE, *route(x_NE, experts.router_XE, PER_TOKEN), silu_times)


def all_of_them(experts: Experts, x_NE: Tensor) -> Tensor:
    return experts.run_all(x_NE, *route(x_NE, experts.router_XE, PER_TOKEN), silu_times)


@pytest.mark.parametrize("tokens", [1, 2, 40])
@pytest.mark.parametrize("run", [grouped, all_of_them])
def test_outputs_and_gradients_are_transformers(run: Run, tokens: int) -> None:
    """Of few tokens some experts get none."""
    module = block()
    x_NE = torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(1), requires_grad=True)
    weights = torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(2))
    results = []
    for out in (lambda: module(x_NE[None])[0], lambda: run(experts_of(module), x_NE)):
        value = out()
        (value * weights).sum().backward()
        results.append((value.detach(), {**gradients(module), "x": x_NE.grad.clone()}))
        x_NE.grad = None
    (expected, expected_gradients), (found, found_gradients) = results
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE)
    assert largest_relative_difference(expected_gradients, found_gradients) < TOLERANCE


@pytest.mark.parametrize("run", [grouped, all_of_them])
def test_bfloat16_chooses_as_transformers_and_rounds_no_more(run: Run) -> None:
    module, exact = block(torch.bfloat16), block()
    exact.load_state_dict({name: x.float() for name, x in module.state_dict().items()})
    x_NE = torch.randn(200, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16()
    with torch.no_grad():
        _, theirs_NK, expert_NK = module.gate(x_NE)
        weight_NK, ours_NK = route(x_NE, module.gate.weight, PER_TOKEN)
        assert torch.equal(ours_NK, expert_NK)
        assert torch.equal(weight_NK, theirs_NK)
        wanted = exact.experts(x_NE.float(), expert_NK, theirs_NK.float())
        outs = run(experts_of(module), x_NE), module.experts(x_NE, expert_NK, theirs_NK)
        errors = [(out.float() - wanted).norm() for out in outs]
    assert errors[0] < 1.2 * errors[1]


def test_a_model_with_an_mlp_for_all_tokens_in_one_layer_is_transformers() -> None:
    """As `mlp_only_layers` says: log-probs and gradients of packed rows with no, one and three images, and drawing."""
    parts = with_dense_layer(tiny("qwen3_vl_moe", num_experts=6, experts_per_token=3))
    chats = [
        user("How many?"),
        user(image(1), "How many?"),
        user(image(1), image(2, 64, 48), "and", image(3, 48, 96), "?"),
    ]
    prompts, counts = list(map(renderer(parts).prompt, chats)), [(5, 3), (4, 1), (6,)]
    expected = of_row(reference_logprobs, parts, prompts, random_completions(counts))
    expected.sum().backward()
    expected_gradients = gradients(parts.network)
    assert "model.language_model.layers.1.mlp.up_proj.weight" in expected_gradients
    for make in (VLM, PlainVLM):
        vlm = make(parts.network, parts.processor.banned_ids)
        found = vlm(row_of(parts, counts, prompts), temperature=1.0, chunk_tokens=100).logprobs_A
        found.sum().backward()
        torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)
        assert largest_relative_difference(expected_gradients, gradients(parts.network)) < TOLERANCE
    for cache in ("dense", "paged"):
        groups = generate(make_engine(parts, cache=cache), prompts, seeded(3, max_new_tokens=8), n=3)
        with torch.no_grad():
            theirs = of_row(reference_logprobs, parts, prompts, [[x.token_ids_T for x in group] for group in groups])
        ours = torch.from_numpy(np.concatenate([x.logprobs_T for group in groups for x in group]))
        torch.testing.assert_close(ours, theirs, atol=LOGPROB_TOLERANCE, rtol=0)


def test_a_frozen_router_keeps_its_weights_and_sends_its_gradient_on() -> None:
    parts = tiny("qwen3_vl_moe")
    whole = set(trainable_parameters(parts.network))
    choose_trainable(parts.network, Model(tiny=TinyModel(), freeze_router=True), seed=0)
    frozen = whole - set(trainable_parameters(parts.network))
    assert frozen == {f"model.language_model.layers.{layer}.mlp.gate.weight" for layer in range(3)}


def test_a_router_that_is_not_there_cannot_be_frozen() -> None:
    refused = r"model\.freeze_router=true, but a qwen3_vl has no experts .* remove the setting"
    with pytest.raises(ConfigError, match=refused):
        choose_trainable(tiny("qwen3_vl").network, Model(tiny=TinyModel(), freeze_router=True), seed=0)


@pytest.mark.parametrize("name", ["gate_proj", "gate_up_proj", "experts", "gate"])
def test_experts_and_router_get_no_adapter(name: str) -> None:
    settings = Model(tiny=TinyModel(), lora=Lora(targets=("q_proj", name)))
    with pytest.raises(ConfigError, match=rf"targets: {name} .*experts of a mixture are not linear layers"):
        choose_trainable(tiny("qwen3_vl_moe").network, settings, seed=0)


def test_the_load_of_experts_by_hand() -> None:
    load = ExpertLoad()
    assert imbalance([load.counts(), load.counts()]) is None
    load.add(2, torch.tensor([[0, 1], [0, 2]]), 4)
    load.add(2, torch.tensor([[3, 0]]), 4)
    load.add(0, torch.tensor([[3, 1], [0, 2]]), 4)
    counts = load.counts()
    assert counts == [[1, 1, 1, 1], [3, 1, 1, 1]]
    load.restart()
    assert load.counts() == []
    assert imbalance([counts]) == (1 + 3 / 1.5) / 2
    assert imbalance([counts, [[3, 1, 1, 1], [0, 2, 2, 2]]]) == (4 / 2.5 + 1) / 2


def test_a_layer_counts_the_experts_that_it_runs() -> None:
    module, load = block(), ExpertLoad()
    x_NE = torch.randn(50, WIDTH, generator=torch.Generator().manual_seed(1))
    rope = Rope.of(torch.zeros(50, 2), torch.zeros(50, 2))
    call = LayerCall(1, None, rope, lambda *_: x_NE, expert_load=load)  # type: ignore[arg-type]
    with torch.no_grad():
        experts_of(module)(x_NE, call)
        chosen = module.gate(x_NE)[2]
    assert load.counts() == [torch.bincount(chosen.flatten(), minlength=NUM_EXPERTS).tolist()]
