"""Shared prefix = repeated prefix: the packed pass against transformers' own, one row at a time."""

from __future__ import annotations

import pytest
import torch

from fovea.models.recompute import Recompute, recompute_activations
from fovea.models.shared_prefix.attention import Kernel
from fovea.models.tiny import TinyParts
from fovea.models.vision.feature_cache import FeatureCache
from fovea.models.vlm import VLM
from fovea.train.packing import pack_row
from tests.reference import gradients, largest_relative_difference, reference_logprobs
from tests.tiny_models import CPU, image, mixed_prompts, random_completions, renderer, tiny, user

LOGPROB_TOLERANCE = 1e-5
"""Log-probs near -6 in float32: rounding alone gives 2e-6, and more or less of it on another CPU."""
GRADIENT_TOLERANCE = 1e-5
UNEQUAL = ((5, 1, 7), (3, 9), (4,))


@pytest.mark.parametrize("attention", ["merged", "varlen", "varlen_gathered", "sdpa", "eager"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_and_gradients_equal_separate_rows(parts: TinyParts, temperature: float, attention: Kernel) -> None:
    prompts, completions = mixed_prompts(parts), random_completions(UNEQUAL)
    expected = torch.cat(
        [
            reference_logprobs(parts, prompt, completion, temperature)
            for prompt, group in zip(prompts, completions, strict=True)
            for completion in group
        ]
    )
    expected.sum().backward()
    expected_gradients = gradients(parts.network)
    vlm = VLM(parts.network, parts.processor.banned_ids, attention=attention)
    row = pack_row(parts.processor.family, prompts, completions, CPU)
    scores = vlm(row, temperature=temperature, chunk_tokens=1000)
    scores.logprobs_A.sum().backward()
    torch.testing.assert_close(scores.logprobs_A, expected, atol=LOGPROB_TOLERANCE, rtol=0)
    assert largest_relative_difference(expected_gradients, gradients(parts.network)) < GRADIENT_TOLERANCE


def test_row_holds_each_prompt_once_and_no_last_tokens(vlm: VLM, parts: TinyParts) -> None:
    prompts, completions = mixed_prompts(parts), random_completions(UNEQUAL)
    row = pack_row(parts.processor.family, prompts, completions, CPU)
    assert row.num_tokens == sum(prompt.num_tokens for prompt in prompts) + sum(sum(n) - len(n) for n in UNEQUAL)
    assert row.num_actions == sum(map(sum, UNEQUAL))
    assert vlm(row, temperature=1.0, chunk_tokens=10).logprobs_A.shape == (row.num_actions,)


def test_chunks_change_neither_scores_nor_gradients(vlm: VLM, parts: TinyParts) -> None:
    row = pack_row(parts.processor.family, mixed_prompts(parts), random_completions(UNEQUAL), CPU)
    results = []
    for chunk in (1000, 4):
        scores = vlm(row, temperature=1.0, chunk_tokens=chunk)
        (scores.logprobs_A.sum() + scores.entropies_A.sum()).backward()
        results.append((scores, gradients(parts.network)))
    (whole, whole_gradients), (cut, cut_gradients) = results
    torch.testing.assert_close(cut.logprobs_A, whole.logprobs_A, atol=LOGPROB_TOLERANCE, rtol=0)
    torch.testing.assert_close(cut.entropies_A, whole.entropies_A, atol=LOGPROB_TOLERANCE, rtol=0)
    assert largest_relative_difference(whole_gradients, cut_gradients) < GRADIENT_TOLERANCE


def test_entropy_is_that_of_torchs_distribution(vlm: VLM, parts: TinyParts) -> None:
    row = pack_row(parts.processor.family, mixed_prompts(parts)[:1], random_completions(UNEQUAL[:1]), CPU)
    hidden = vlm.action_states(row)
    logits = parts.network.get_submodule("lm_head")(hidden)
    logits[:, list(parts.processor.banned_ids)] = -torch.inf
    expected = torch.distributions.Categorical(logits=logits / 0.5).entropy()
    entropies = vlm(row, temperature=0.5, chunk_tokens=1000).entropies_A
    torch.testing.assert_close(entropies, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("how", ["full", "selective"])
def test_gradient_checkpointing_changes_nothing(vlm: VLM, parts: TinyParts, how: Recompute) -> None:
    row = pack_row(parts.processor.family, mixed_prompts(parts), random_completions(UNEQUAL), CPU)
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
    prompts, completions = mixed_prompts(parts), random_completions(UNEQUAL)
    row = pack_row(parts.processor.family, prompts, completions, CPU)
    with torch.no_grad():
        encoded = VLM(parts.network, parts.processor.banned_ids)(row, temperature=1.0, chunk_tokens=1000).logprobs_A
        cache = FeatureCache(2**20)
        cached_vlm = VLM(parts.network, parts.processor.banned_ids, feature_cache=cache)
        passes = [cached_vlm(row, temperature=1.0, chunk_tokens=1000).logprobs_A for _ in range(3)]
    assert cache.encoded_images == 3
    for cached in passes:
        torch.testing.assert_close(cached, encoded, atol=LOGPROB_TOLERANCE, rtol=0)


def test_one_image_in_two_prompts_is_encoded_once_and_collects_both_gradients(parts: TinyParts) -> None:
    render = renderer(parts)
    prompts = [render.prompt(user(image(1), question)) for question in ("How many?", "What colour is the circle?")]
    completions = random_completions([(3,), (4,)])
    expected = [reference_logprobs(parts, prompt, group[0]) for prompt, group in zip(prompts, completions, strict=True)]
    torch.cat(expected).sum().backward()
    expected_gradients = gradients(parts.network)
    vlm = VLM(parts.network, parts.processor.banned_ids)
    encoded: list[int] = []
    tower = parts.network.get_submodule("model.visual")
    tower.register_forward_pre_hook(lambda _module, args: encoded.append(len(args[0])))
    vlm(
        pack_row(parts.processor.family, prompts, completions, CPU), temperature=1.0, chunk_tokens=100
    ).logprobs_A.sum().backward()
    assert encoded == [36], "one image of 36 patches"
    assert largest_relative_difference(expected_gradients, gradients(parts.network)) < GRADIENT_TOLERANCE


def test_what_padding_holds_does_not_matter(vlm: VLM, parts: TinyParts) -> None:
    """A row of unequal groups equals its groups alone: nothing leaks from one into another."""
    prompts, completions = mixed_prompts(parts), random_completions(UNEQUAL)
    with torch.no_grad():
        together = vlm(
            pack_row(parts.processor.family, prompts, completions, CPU), temperature=1.0, chunk_tokens=100
        ).logprobs_A
        alone = [
            vlm(
                pack_row(parts.processor.family, [prompt], [[completion]], CPU), temperature=1.0, chunk_tokens=100
            ).logprobs_A
            for prompt, group in zip(prompts, completions, strict=True)
            for completion in group
        ]
    torch.testing.assert_close(together, torch.cat(alone), atol=LOGPROB_TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    "shape",
    [
        {"num_heads": 4, "num_kv_heads": 2},
        # deepstack's features are added behind all layers: no token may be left out of the last one
        {"num_layers": 1},
    ],
)
def test_shapes_of_a_decoder(shape: dict[str, int]) -> None:
    parts = tiny("qwen3_vl", **shape)
    prompts, completions = mixed_prompts(parts), random_completions(UNEQUAL)
    expected = torch.cat(
        [reference_logprobs(parts, p, c) for p, group in zip(prompts, completions, strict=True) for c in group]
    )
    scores = VLM(parts.network, parts.processor.banned_ids)(
        pack_row(parts.processor.family, prompts, completions, CPU), temperature=1.0, chunk_tokens=100
    )
    torch.testing.assert_close(scores.logprobs_A, expected, atol=LOGPROB_TOLERANCE, rtol=0)
