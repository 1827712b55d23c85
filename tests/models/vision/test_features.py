"""Features of a frozen tower: a bounded memory that models share."""

from __future__ import annotations

import copy

import pytest
import torch

from fovea.models.tiny import TinyParts
from fovea.models.vision.feature_cache import FeatureCache
from fovea.models.vlm import VLM
from fovea.types import PromptImage
from tests.tiny_models import image, renderer, tiny, tower_passes, user

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
        together = VLM(parts.network, parts.processor.banned_ids, feature_cache=FeatureCache(2**20)).image_features(
            images
        )
        alone = [
            VLM(parts.network, parts.processor.banned_ids, feature_cache=FeatureCache(2**20)).image_features([each])[0]
            for each in images
        ]
    finally:
        torch.set_num_threads(1)
    for a, b in zip(together, alone, strict=True):
        assert torch.equal(a.embeds_VD, b.embeds_VD)


def test_a_rollout_encodes_by_patches_and_a_row_all_images_at_once(
    parts: TinyParts, monkeypatch: pytest.MonkeyPatch
) -> None:
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
