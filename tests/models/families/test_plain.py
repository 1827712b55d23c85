"""The plain path against the fast one, which other tests compare with transformers, for every Qwen family."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fovea.loop import train
from fovea.metrics.log import read_metrics
from fovea.models.heads import ValueHead
from fovea.models.plain import PlainVLM
from fovea.models.recompute import Recompute, recompute_plainly
from fovea.models.trainable import merged_weights
from fovea.models.vlm import VLM
from fovea.train.packing import pack_row
from fovea.types import Sampling
from fovea.wiring.run import build
from tests.plain_runs import run_settings
from tests.policies import make_batch, policy_on, train_settings
from tests.reference import gradients, largest_relative_difference
from tests.rollout.drawing import generate, make_engine, plain_engine, same, seeded
from tests.rollout.two_turns import assert_drawn_and_scored_alike
from tests.tiny_models import CPU, FAMILIES, mixed_prompts, random_completions, tiny

TOLERANCE = 1e-5
"""Of log-probs near -6, and relative of gradients: float32 sums in another order."""
UNEQUAL = ((5, 1, 7), (3, 9), (4,))


def test_logprobs_entropies_values_and_gradients_equal_the_fast_path(family: str) -> None:
    scores, grads = [], []
    for kind in (VLM, PlainVLM):
        parts = tiny(family)
        head = ValueHead(64, detach_trunk=False)
        torch.nn.init.constant_(head.linear.weight, 0.1)
        vlm = kind(parts.network, parts.processor.banned_ids, value_head=head)
        row = pack_row(vlm.family, mixed_prompts(parts), random_completions(UNEQUAL), CPU)
        found = vlm(row, temperature=0.8, chunk_tokens=10)
        assert found.values_A is not None
        (found.logprobs_A.sum() + found.entropies_A.sum() + found.values_A.sum()).backward()
        scores.append(found)
        grads.append(gradients(vlm))
    for name in ("logprobs_A", "entropies_A", "values_A"):
        fast, plain = (getattr(each, name) for each in scores)
        torch.testing.assert_close(plain, fast, atol=TOLERANCE, rtol=1e-5)
    assert largest_relative_difference(*grads) < TOLERANCE


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("how", ["full", "selective"])
def test_gradient_checkpointing_changes_nothing(how: Recompute) -> None:
    parts = tiny("qwen3_vl")
    vlm = PlainVLM(parts.network, parts.processor.banned_ids).train()
    row = pack_row(vlm.family, mixed_prompts(parts), random_completions(UNEQUAL), CPU)
    results = []
    for recompute in ("none", how):
        recompute_plainly(parts.network, recompute)
        vlm(row, temperature=1.0, chunk_tokens=100).logprobs_A.sum().backward()
        results.append(gradients(vlm))
    assert largest_relative_difference(*results) < TOLERANCE


@pytest.mark.parametrize(
    "samplings",
    [
        [Sampling(max_new_tokens=20, temperature=0)] * 3,
        seeded(3, max_new_tokens=12, temperature=0.8),
        seeded(3, max_new_tokens=40, stop=("e", "a")),
    ],
    ids=["greedy", "sampled", "stop strings"],
)
def test_the_plain_engine_draws_the_completions_of_the_fast_one(family: str, samplings: list[Sampling]) -> None:
    """Greedy, sampled from the same random numbers, and cut at stop strings."""
    fast, plain = (
        generate(engine, mixed_prompts(parts), samplings, n=3)
        for parts, engine in ((each, make(each)) for make in (make_engine, plain_engine) for each in [tiny(family)])
    )
    assert all(same(a, b) for a, b in zip(fast, plain, strict=True))
    assert {completion.version for group in plain for completion in group} == {7}


def test_an_engine_of_its_own_takes_the_policys_weights() -> None:
    policy, other = tiny("qwen3_vl", seed=0), tiny("qwen3_vl", seed=1)
    greedy = [Sampling(max_new_tokens=8, temperature=0)] * 3
    engine = plain_engine(other)
    engine.load_weights({name: x.clone() for name, x in merged_weights(policy.network)}, version=7)
    prompts = mixed_prompts(policy)
    expected = generate(plain_engine(policy), prompts, greedy, n=1)
    assert all(same(a, b) for a, b in zip(generate(engine, prompts, greedy, n=1), expected, strict=True))


def test_an_update_moves_the_weights_as_on_the_fast_path() -> None:
    moved = []
    for kind in (VLM, PlainVLM):
        parts = tiny("qwen2_5_vl")
        settings = train_settings(plain_update_every_steps=1)
        policy = policy_on(kind(parts.network, parts.processor.banned_ids), settings)
        metrics = policy.update(make_batch(parts))
        moved.append((metrics, {name: x.detach().clone() for name, x in parts.network.named_parameters()}))
    (fast, fast_weights), (plain, plain_weights) = moved
    assert plain["loss"] == pytest.approx(fast["loss"], rel=1e-4)
    assert plain["grad_norm"] == pytest.approx(fast["grad_norm"], rel=1e-4)
    for name, weight in fast_weights.items():
        # Adam's first step is the sign of the gradient: where that is about 0 the step may be of either sign
        assert np.isclose(plain_weights[name].numpy(), weight.numpy(), atol=1e-6).mean() > 0.99, name


def test_turns_with_images_of_their_own_are_drawn_and_scored_as_on_the_fast_path(family: str) -> None:
    """Three turns; the plain engine keeps no keys and computes every turn from the whole conversation."""
    assert_drawn_and_scored_alike(tiny(family), tiny(family))


def test_a_run_draws_the_same_by_both_paths(tmp_path: Path) -> None:
    """The same rewards in its first step, sampled by the same weights."""
    rewards = []
    for path in ("auto", "off"):
        model = {"model.path": None, "model.tiny": {}, "model.fast_path": path}
        train(build(run_settings(tmp_path / path, tmp_path, **model)))
        rewards.append(read_metrics(tmp_path / path)[0]["reward"])
    assert rewards[0] == rewards[1]
