"""Packed passes against rows of transformers, one at a time; recomputed activations and cached features."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fovea.config.loading import load_config
from fovea.config.model import Lora, Model, TinyModel
from fovea.models.recompute import Recompute, kept_bytes, recompute_activations
from fovea.models.shared_prefix.attention import Kernel
from fovea.models.tiny import TinyParts
from fovea.models.trainable import choose_trainable, trainable_parameters
from fovea.models.vision.feature_cache import FeatureCache
from fovea.models.vlm import VLM
from fovea.train.update_metrics import ActivationMeter
from fovea.types import PromptImage
from fovea_gym.errors import ConfigError
from tests.policies import GRADIENT_TOLERANCE
from tests.reference import UNEQUAL, gradients, largest_relative_difference, of_row, reference_logprobs, row_of, vlm_of
from tests.tiny_models import image, mixed_prompts, random_completions, renderer, tiny, tower_passes, user

LOGPROB_TOLERANCE = 1e-5
"""Log-probs near -6 in float32: rounding alone gives 2e-6, and more or less of it on another CPU."""


KERNELS: tuple[Kernel, ...] = ("merged", "varlen", "varlen_gathered", "sdpa", "eager")


@pytest.mark.parametrize(("attention", "temperature"), [*((each, 0.7) for each in KERNELS), ("merged", 1.0)])
def test_logprobs_and_gradients_equal_separate_rows(parts: TinyParts, temperature: float, attention: Kernel) -> None:
    prompts, completions = mixed_prompts(parts), random_completions(UNEQUAL)
    expected = of_row(reference_logprobs, parts, prompts, completions, temperature)
    expected.sum().backward()
    expected_gradients = gradients(parts.network)
    scores = vlm_of(parts, attention=attention)(row_of(parts), temperature=temperature, chunk_tokens=1000)
    scores.logprobs_A.sum().backward()
    torch.testing.assert_close(scores.logprobs_A, expected, atol=LOGPROB_TOLERANCE, rtol=0)
    assert largest_relative_difference(expected_gradients, gradients(parts.network)) < GRADIENT_TOLERANCE


def test_row_holds_each_prompt_once_and_no_last_tokens(vlm: VLM, parts: TinyParts) -> None:
    prompts, row = mixed_prompts(parts), row_of(parts)
    assert row.num_tokens == sum(prompt.num_tokens for prompt in prompts) + sum(sum(n) - len(n) for n in UNEQUAL)
    assert row.num_actions == sum(map(sum, UNEQUAL))
    assert vlm(row, temperature=1.0, chunk_tokens=10).logprobs_A.shape == (row.num_actions,)


@pytest.mark.parametrize("how", ["full", "selective"])
def test_gradient_checkpointing_changes_nothing(vlm: VLM, parts: TinyParts, how: Recompute) -> None:
    row = row_of(parts)
    vlm.train()
    vlm(row, temperature=1.0, chunk_tokens=1000).logprobs_A.sum().backward()
    plain = gradients(parts.network)
    recompute_activations(parts.network, how)
    passes: list[str] = []
    layer = parts.network.get_submodule("model.language_model.layers.0.input_layernorm")
    layer.register_forward_pre_hook(lambda *_: passes.append("forward"))
    vlm(row, temperature=1.0, chunk_tokens=1000).logprobs_A.sum().backward()
    assert len(passes) == 2, "once, and once more in the backward pass"
    assert largest_relative_difference(plain, gradients(parts.network)) < GRADIENT_TOLERANCE


def test_cached_features_equal_encoded_ones_and_are_made_once(parts: TinyParts) -> None:
    row, cache = row_of(parts), FeatureCache(2**20)
    cached_vlm = vlm_of(parts, feature_cache=cache)
    with torch.no_grad():
        encoded = vlm_of(parts)(row, temperature=1.0, chunk_tokens=1000).logprobs_A
        passes = [cached_vlm(row, temperature=1.0, chunk_tokens=1000).logprobs_A for _ in range(3)]
    assert cache.encoded_images == 3
    for cached in passes:
        torch.testing.assert_close(cached, encoded, atol=LOGPROB_TOLERANCE, rtol=0)


def test_one_image_in_two_prompts_is_encoded_once_and_collects_both_gradients(parts: TinyParts) -> None:
    questions = [user(image(1), question) for question in ("How many?", "What colour is the circle?")]
    prompts, counts = list(map(renderer(parts).prompt, questions)), [(3,), (4,)]
    of_row(reference_logprobs, parts, prompts, random_completions(counts)).sum().backward()
    expected_gradients, vlm = gradients(parts.network), vlm_of(parts)
    encoded = tower_passes(vlm)
    vlm(row_of(parts, counts, prompts), temperature=1.0, chunk_tokens=100).logprobs_A.sum().backward()
    assert encoded == [36], "one image of 36 patches"
    assert largest_relative_difference(expected_gradients, gradients(parts.network)) < GRADIENT_TOLERANCE


# deepstack's features are added behind all layers: in a decoder of one, no token may be left out of the last one
@pytest.mark.parametrize("shape", [{"num_heads": 4, "num_kv_heads": 2}, {"num_layers": 1}], ids=str)
def test_shapes_of_a_decoder(shape: dict[str, int]) -> None:
    parts = tiny("qwen3_vl", **shape)
    expected = of_row(reference_logprobs, parts, mixed_prompts(parts), random_completions(UNEQUAL))
    scores = vlm_of(parts)(row_of(parts), temperature=1.0, chunk_tokens=100)
    torch.testing.assert_close(scores.logprobs_A, expected, atol=LOGPROB_TOLERANCE, rtol=0)


HEADS = {"hidden_size": 128, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 384}
MID = {**HEADS, "vision_hidden_size": 96, "vision_depth": 2}
SETTINGS = {
    "trained tower": ("qwen2_5_vl", Model(tiny=TinyModel())),
    "deepstack": ("qwen3_vl", Model(tiny=TinyModel())),
    "experts": ("qwen3_vl_moe", Model(tiny=TinyModel())),
    "lora": ("qwen2_vl", Model(tiny=TinyModel(), lora=Lora(rank=4))),
    "dropout": ("qwen3_vl", Model(tiny=TinyModel(), lora=Lora(rank=4, dropout=0.2))),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """What a forward and backward pass gave and took."""

    gradients: dict[str, torch.Tensor]
    num_bytes: int
    flops: int


def grouped_flops(first: torch.Size, second: torch.Size, *_args: object, **_kwargs: object) -> int:
    """Of a product of experts, which torch does not count: each row of one factor with the columns of one expert."""
    return 2 * first.numel() * second[-1]


def run(family: str, settings: Model, how: Recompute) -> Pass:
    parts = tiny(family, **MID)
    choose_trainable(parts.network, settings, seed=0)
    recompute_activations(parts.network, how)
    vlm = VLM(parts.network, parts.processor.banned_ids).train()
    row = row_of(parts, [(9, 20), (30,), (25, 5)])
    meter = ActivationMeter(vlm, lambda: kept_bytes(vlm.network))
    torch.manual_seed(0)
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten._grouped_mm: grouped_flops}) as counter:
        with meter(1):
            scores = vlm(row, temperature=1.0, chunk_tokens=1000)
        scores.logprobs_A.sum().backward()
    trained = trainable_parameters(vlm)
    return Pass(
        gradients={name: x.grad for name, x in trained.items() if x.grad is not None},
        num_bytes=meter.num_bytes,
        flops=counter.get_total_flops(),
    )


@pytest.mark.parametrize(("family", "settings"), SETTINGS.values(), ids=SETTINGS)
def test_each_kind_gives_the_gradients_of_none_and_keeps_less(family: str, settings: Model) -> None:
    none, selective, full = (run(family, settings, how) for how in ("none", "selective", "full"))
    for found in (selective, full):
        assert found.gradients.keys() == none.gradients.keys()
        assert all(torch.equal(found.gradients[name], x) for name, x in none.gradients.items())
    assert none.num_bytes > 1.4 * selective.num_bytes > 1.4 * 2 * full.num_bytes


@pytest.mark.parametrize("name", ["deepstack", "experts"])
def test_selective_multiplies_no_more_matrices_than_none(name: str) -> None:
    none, selective, full = (run(*SETTINGS[name], how) for how in ("none", "selective", "full"))
    assert selective.flops == none.flops
    assert full.flops > 1.2 * none.flops


@pytest.mark.parametrize("value", ["true", "false"])
def test_what_was_a_switch_names_its_values(value: str) -> None:
    with pytest.raises(ConfigError, match=r"train\.gradient_checkpointing: \w+ does not fit; allowed: none \| full"):
        load_config([], ["model.tiny={}", f"train.gradient_checkpointing={value}"])


GENEROUS = 2**30


def pictures(parts: TinyParts, count: int = 5) -> list[PromptImage]:
    render = renderer(parts)
    return [render.prompt(user(image(seed), "x")).images[0] for seed in range(count)]


def test_feature_cache_keeps_to_its_bound(parts: TinyParts) -> None:
    images = pictures(parts)
    vlm = VLM(parts.network, parts.processor.banned_ids)
    with torch.no_grad():
        one = vlm.encode(images[:1])[0].num_bytes
        cache = FeatureCache(2 * one)
        for picture in images:
            cache.get([picture], vlm.encode)
        cache.get(images[3:], vlm.encode)
        assert cache.encoded_images == 5, "the two newest are still there"
        cache.get(images[:1], vlm.encode)
    assert cache.encoded_images == 6, "the oldest had left"


def test_cached_features_do_not_depend_on_what_was_encoded_beside_them(parts: TinyParts) -> None:
    """To the last bit: a resumed run begins with an empty cache and meets its images in other company."""
    images = pictures(parts, 7)
    torch.set_num_threads(2)
    try:
        together, *alone = (
            VLM(parts.network, parts.processor.banned_ids, feature_cache=FeatureCache(2**20)).image_features(each)
            for each in (images, *([image] for image in images))
        )
    finally:
        torch.set_num_threads(1)
    for a, (b,) in zip(together, alone, strict=True):
        assert torch.equal(a.embeds_VD, b.embeds_VD)


def test_a_rollout_encodes_by_patches_and_a_row_at_once(parts: TinyParts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also without gradients: where weights are sharded, every process must make as many passes over a row."""
    images, vlm = pictures(parts), VLM(parts.network, parts.processor.banned_ids)
    of_one = len(images[0].tensors["pixel_values"])
    monkeypatch.setattr("fovea.models.vlm.PASS_PATCHES", 2 * of_one)
    patches = tower_passes(vlm)
    with torch.no_grad():
        whole, by_passes = vlm.image_features(images), vlm.rollout_features(images)
    assert patches == [5 * of_one, 2 * of_one, 2 * of_one, of_one]
    for a, b in zip(whole, by_passes, strict=True):
        torch.testing.assert_close(a.embeds_VD, b.embeds_VD)


def test_a_copy_of_the_model_shares_the_memory() -> None:
    parts = tiny("qwen3_vl")
    cache, images = FeatureCache(GENEROUS), pictures(parts)
    vlm = VLM(parts.network, parts.processor.banned_ids, feature_cache=cache)
    for model in (copy.deepcopy(vlm), vlm):
        model.image_features(images)
        assert cache.encoded_images == len(images)
