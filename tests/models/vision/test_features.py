"""Features of a frozen tower: a bounded memory, and files that give back every bit."""

from __future__ import annotations

import copy
import gc
from pathlib import Path

import pytest
import torch

from fovea.errors import ConfigError
from fovea.models.tiny import TinyParts
from fovea.models.vision.feature_cache import FeatureCache, ImageFeatures, SpillFolder
from fovea.models.vlm import VLM
from fovea.types import PromptImage
from tests.tiny_models import image, renderer, tiny, user

GENEROUS = 2**30


def pictures(parts: TinyParts, count: int = 5) -> list[PromptImage]:
    render = renderer(parts)
    return [render.prompt(user(image(seed), "x")).images[0] for seed in range(count)]


def assert_equal(first: ImageFeatures, second: ImageFeatures) -> None:
    for a, b in zip(first.tensors, second.tensors, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def test_feature_cache_keeps_to_its_bound(parts: TinyParts) -> None:
    render = renderer(parts)
    images = [render.prompt(user(image(seed), "x")).images[0] for seed in range(5)]
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
    render = renderer(parts)
    images = [render.prompt(user(image(seed), "x")).images[0] for seed in range(7)]
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
    patches: list[int] = []
    hook = parts.network.model.visual.register_forward_pre_hook(lambda _tower, args: patches.append(len(args[0])))
    with torch.no_grad():
        whole, by_passes = vlm.image_features(images), vlm.rollout_features(images)
    hook.remove()
    assert patches == [5 * of_one, 2 * of_one, 2 * of_one, of_one]
    for a, b in zip(whole, by_passes, strict=True):
        torch.testing.assert_close(a.embeds_VD, b.embeds_VD)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_leaves_memory_comes_back_from_a_file_bit_for_bit(
    parts: TinyParts, dtype: torch.dtype, tmp_path: Path
) -> None:
    """A memory that holds nothing: everything spills."""
    parts.network.to(dtype)
    images = pictures(parts)
    cache = FeatureCache(0, SpillFolder(tmp_path / "features", GENEROUS))
    vlm = VLM(parts.network, parts.processor.banned_ids, feature_cache=cache)
    first, second = vlm.image_features(images), vlm.image_features(images[::-1])[::-1]
    assert (cache.memory_hits, cache.file_hits, cache.encoded_images) == (0, 5, 5)
    for a, b in zip(first, second, strict=True):
        assert_equal(a, b)


def test_each_read_is_counted_where_it_was_served(tmp_path: Path) -> None:
    parts = tiny("qwen3_vl")
    images = pictures(parts)
    one = VLM(parts.network, parts.processor.banned_ids).encode(images[:1])[0].num_bytes
    cache = FeatureCache(2 * one, SpillFolder(tmp_path / "features", GENEROUS))
    vlm = VLM(parts.network, parts.processor.banned_ids, feature_cache=cache)
    vlm.image_features(images)
    vlm.image_features([*images[3:], images[3]])
    assert (cache.memory_hits, cache.file_hits, cache.encoded_images) == (2, 0, 5), "an image twice is one read"
    vlm.image_features(images[:1])
    assert (cache.memory_hits, cache.file_hits, cache.encoded_images) == (2, 1, 5)


def test_files_keep_to_their_bound_and_the_oldest_go(tmp_path: Path) -> None:
    parts = tiny("qwen3_vl")
    images = pictures(parts)
    one = VLM(parts.network, parts.processor.banned_ids).encode(images[:1])[0].num_bytes
    folder = tmp_path / "features"
    cache = FeatureCache(0, SpillFolder(folder, 2 * one))
    vlm = VLM(parts.network, parts.processor.banned_ids, feature_cache=cache)
    for picture in images:
        vlm.image_features([picture])
        tensors = sum(path.stat().st_size for path in folder.iterdir())
        assert tensors < 2 * one + 1024, "and a header each"
    assert len(list(folder.iterdir())) == 2
    vlm.image_features(images[3:])
    assert (cache.file_hits, cache.encoded_images) == (2, 5)
    vlm.image_features(images[:1])
    assert (cache.file_hits, cache.encoded_images) == (2, 6)


def test_features_larger_than_the_bound_are_not_written(tmp_path: Path) -> None:
    parts = tiny("qwen3_vl")
    cache = FeatureCache(0, SpillFolder(tmp_path / "features", 10))
    VLM(parts.network, parts.processor.banned_ids, feature_cache=cache).image_features(pictures(parts, 2))
    assert list((tmp_path / "features").iterdir()) == []


@pytest.mark.parametrize("damage", ["gone", "empty", "short", "noise", "folder gone"])
def test_a_damaged_file_is_encoded_again(damage: str, tmp_path: Path) -> None:
    parts = tiny("qwen3_vl")
    images = pictures(parts, 1)
    folder = tmp_path / "features"
    cache = FeatureCache(0, SpillFolder(folder, GENEROUS))
    vlm = VLM(parts.network, parts.processor.banned_ids, feature_cache=cache)
    (before,) = vlm.image_features(images)
    (path,) = folder.iterdir()
    if damage == "gone":
        path.unlink()
    elif damage == "folder gone":
        path.unlink()
        folder.rmdir()
    else:
        whole = path.read_bytes()
        path.write_bytes({"empty": b"", "short": whole[: len(whole) // 2], "noise": b"\xff" * 100}[damage])
    (after,) = vlm.image_features(images)
    assert_equal(before, after)
    assert (cache.file_hits, cache.encoded_images) == (0, 2)
    vlm.image_features(images)
    assert cache.file_hits == (damage != "folder gone"), "the new file is sound, where there can be one"


def test_a_key_is_no_path(tmp_path: Path) -> None:
    spill = SpillFolder(tmp_path / "features", GENEROUS)
    for key in ("../../outside", "a/b", "x" * 1000, "nul\0", ""):
        spill.write(key, [torch.full((2,), float(len(key)))])
        tensors = spill.read(key, torch.device("cpu"))
        assert tensors is not None
        assert tensors[0].tolist() == [float(len(key))] * 2
    assert len(list((tmp_path / "features").iterdir())) == 5
    assert [path.name for path in tmp_path.iterdir()] == ["features"]


def test_a_folder_of_an_earlier_run_is_emptied_and_one_that_is_over_removed(tmp_path: Path) -> None:
    folder = tmp_path / "features"
    folder.mkdir()
    (folder / "old.safetensors").write_bytes(b"of other weights")
    spill = SpillFolder(folder, GENEROUS)
    assert list(folder.iterdir()) == []
    del spill
    gc.collect()
    assert not folder.exists()


def test_a_folder_that_cannot_be_made_says_which_setting_asked(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(
        ConfigError, match=r"model\.feature_spill_gib: .* cannot be made .*; set model\.feature_spill_gib=0"
    ):
        SpillFolder(tmp_path / "file" / "features", GENEROUS)


def test_a_copy_of_the_model_shares_the_memory() -> None:
    parts = tiny("qwen3_vl")
    vlm = VLM(parts.network, parts.processor.banned_ids, feature_cache=FeatureCache(GENEROUS))
    assert copy.deepcopy(vlm)._feature_cache is vlm._feature_cache
