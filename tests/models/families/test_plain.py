"""The plain path against the fast one for every Qwen family, and models without a family against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Pix2StructConfig

from fovea.config.model import Model
from fovea.errors import ModelError
from fovea.loop import train
from fovea.metrics.log import read_metrics
from fovea.models.families.auto import AutoFamily
from fovea.models.families.registry import FAMILIES as NAMED_FAMILIES
from fovea.models.plain import PlainVLM
from fovea.models.processor import load_processor
from fovea.models.recompute import Recompute, recompute_plainly
from fovea.models.trainable import merged_weights
from fovea.models.vlm import VLM
from fovea.train.packing import pack_row
from fovea.types import Sampling
from fovea.wiring.run import build
from fovea_tools.families.tiny import KINDS, save_tiny_kind
from tests.hub_models import (
    CHATS,
    Loaded,
    assert_inputs_equal,
    assert_scored,
    moving_difference,
    needs_image_processors,
)
from tests.hub_models import TOLERANCE as AUTO_TOLERANCE
from tests.plain_runs import run_settings, train_and_export
from tests.reference import gradients, largest_relative_difference, row_of
from tests.rollout.drawing import generate, make_engine, plain_engine, same, seeded
from tests.rollout.two_turns import assert_drawn_and_scored_alike
from tests.tiny_models import CORPUS, CPU, FAMILIES, mixed_prompts, random_completions, tiny, with_values

TOLERANCE = 1e-5
"""Of log-probs near -6, and relative of gradients: float32 sums in another order."""


def test_logprobs_entropies_values_and_gradients_equal_the_fast_path(family: str) -> None:
    scores, grads = [], []
    for kind in (VLM, PlainVLM):
        parts = tiny(family)
        vlm = with_values(kind, parts)
        found = vlm(row_of(parts), temperature=0.8, chunk_tokens=10)
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
    row = row_of(parts)
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


@pytest.fixture(scope="module", params=sorted(KINDS.keys() - NAMED_FAMILIES.keys()))
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return Loaded.of(save_tiny_kind(request.param, tmp_path_factory.mktemp(request.param), CORPUS))


@pytest.fixture(scope="module")
def vlm(loaded: Loaded) -> PlainVLM:
    return PlainVLM(loaded.network, loaded.processor.banned_ids)


@needs_image_processors
def test_prompts_equal_transformers_processor(loaded: Loaded) -> None:
    assert_inputs_equal(loaded)


@needs_image_processors
def test_logprobs_and_gradients_equal_transformers_and_no_row_moves_another(loaded: Loaded, vlm: PlainVLM) -> None:
    completions, prompts = random_completions([(5, 3), (4,), (2, 6)]), loaded.prompts
    found = vlm(pack_row(vlm.family, prompts, completions, CPU), temperature=1.0, chunk_tokens=100).logprobs_A
    expected = torch.cat(
        [loaded.scores(chat, x, 1.0)[0] for chat, group in zip(CHATS, completions, strict=True) for x in group]
    )
    torch.testing.assert_close(found, expected, atol=AUTO_TOLERANCE, rtol=0)
    both = []
    for logprobs in (found, expected):
        logprobs.sum().backward()
        both.append(gradients(loaded.network))
    assert moving_difference(*both) < 1e-5
    completions[1][0] = completions[1][0][::-1].copy()
    with torch.no_grad():
        row = pack_row(vlm.family, prompts, completions, CPU)
        again = vlm(row, temperature=1.0, chunk_tokens=100).logprobs_A
    assert torch.equal(again[:8], found[:8])
    assert torch.equal(again[12:], found[12:])
    assert not torch.equal(again[8:12], found[8:12])


@needs_image_processors
def test_the_engine_draws_what_the_trainer_scores(loaded: Loaded, vlm: PlainVLM) -> None:
    """A prompt without images after others, so that no position of theirs is left."""
    prompts = loaded.prompts[::-1]
    groups = generate(plain_engine(loaded), prompts, seeded(3, max_new_tokens=8), n=2)
    assert_scored(vlm, prompts, groups)


@needs_image_processors
def test_the_start_check_passes(loaded: Loaded, vlm: PlainVLM) -> None:
    assert loaded.check(vlm) < AUTO_TOLERANCE


@needs_image_processors
def test_the_setting_and_the_model_must_agree(tmp_path: Path) -> None:
    folder = str(save_tiny_kind("llava", tmp_path / "llava", CORPUS))
    with pytest.raises(ModelError, match=r"model_type is llava, but Fovea only has .*; set model\.family=auto"):
        load_processor(Model(path=folder))
    named = str(save_tiny_kind("internvl", tmp_path / "internvl", CORPUS))
    with pytest.raises(
        ModelError, match=r"family=auto, but Fovea has a family for .*, a internvl; remove model\.family"
    ):
        load_processor(Model(path=named, family="auto"))


@needs_image_processors
def test_a_config_without_a_visual_token_is_refused() -> None:
    with pytest.raises(ModelError, match=r"config of a pix2struct has no image_token_id or image_token_index"):
        _ = AutoFamily.of(Pix2StructConfig()).image_token_id


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("vipllava", {"algorithm.kl": {"coef": 0.01}}),
        ("aya_vision", {"model.lora.rank": 4, "train.gradient_checkpointing": "selective"}),
        ("llava", {"algorithm.name": "ppo", "model.freeze_vision_tower": True, "model.dtype": "bfloat16"}),
    ],
    ids=["grpo", "lora", "ppo"],
)
@needs_image_processors
def test_it_trains_passes_the_parity_gate_and_is_exported(
    kind: str, settings: dict[str, object], tmp_path: Path
) -> None:
    model, folder = save_tiny_kind(kind, tmp_path / "model", CORPUS), tmp_path / "run"
    train_and_export(folder, tmp_path / "out", model, {"model.family": "auto", **settings})
    again = Loaded.of(tmp_path / "out")
    assert again.check(PlainVLM(again.network, again.processor.banned_ids)) < AUTO_TOLERANCE
