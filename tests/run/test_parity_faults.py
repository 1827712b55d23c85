"""Faults that the parity gate imitates: what each of them changes in a group, and what it leaves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fovea.models.families.registry import family_of
from fovea.run.parity_faults import faulty_groups
from fovea.types import PositionRule, Prompt, PromptImage, Sample, SampleGroup
from tests.tiny_models import tiny

PAD, BEGIN, END = 9, 7, 8
GREY = float(np.float32(1e-30))


def picture(key: str, value: float) -> PromptImage:
    pixels = np.full((24, 4), value, dtype=np.float32)
    tensors = {"pixel_values": pixels, "image_grid_thw": np.array([1, 4, 6])}
    return PromptImage(key=key, tensors=tensors, num_tokens=6, grid=(1, 4, 6))


def text(*parts: int | PromptImage) -> tuple[np.ndarray, tuple[PromptImage, ...]]:
    ids = [[BEGIN, *[PAD] * part.num_tokens, END] if isinstance(part, PromptImage) else [part] for part in parts]
    return np.concatenate(ids), tuple(part for part in parts if isinstance(part, PromptImage))


def group_of(prompt: tuple[int | PromptImage, ...], *later: int | PromptImage) -> SampleGroup:
    """One sample: two actions, then what the environment adds, then an action."""
    ids, images = text(*prompt)
    added, of_later = text(*later) if later else (np.zeros(0, dtype=np.int64), ())
    tokens = np.concatenate([[1, 2], added, [3]])
    mask = np.isin(tokens, [1, 2, 3])
    logprobs = np.where(mask, -np.arange(len(tokens), dtype=np.float32), 0)
    sample = Sample(token_ids_T=tokens, mask_T=mask, rollout_logprobs_T=logprobs, reward=0, weight=0, images=of_later)
    return SampleGroup(prompt=Prompt(token_ids_L=ids, unexpanded_ids_U=ids, images=images), samples=(sample,))


FIRST, SECOND, LATER = picture("a", 2.0), picture("b", 3.0), picture("c", 5.0)
GROUPS = [group_of((4, FIRST, 5)), group_of((6,)), group_of((4, FIRST, SECOND), LATER, 5)]


def changed(name: str, *, packed: bool = True) -> dict[int, SampleGroup]:
    return {index: group for fault, index, group in faulty_groups(GROUPS, PAD, packed=packed) if fault == name}


def keys(group: SampleGroup) -> list[str]:
    return [image.key for image in group.images]


def pixels(group: SampleGroup) -> list[float]:
    return [float(image.tensors["pixel_values"][0, 0]) for image in group.images]


@pytest.mark.parametrize(
    ("name", "seen"),
    [
        ("grey images", {0: [GREY], 2: [GREY] * 3}),
        ("images normalised twice", {0: [3.0], 2: [3.0, 5.0, 9.0]}),
        ("images of other prompts", {0: [3.0], 2: [3.0, 2.0, 5.0]}),  # the only one of a later turn has no other
    ],
)
def test_pixels_change_under_another_key(name: str, seen: dict[int, list[float]]) -> None:
    found = changed(name)
    assert {index: pixels(group) for index, group in found.items()} == seen
    for index, group in found.items():
        same = [a == b for a, b in zip(keys(group), keys(GROUPS[index]), strict=True)]
        kept = [a == b for a, b in zip(pixels(group), pixels(GROUPS[index]), strict=True)]
        assert same == kept
        assert (group.prompt.token_ids_L == GROUPS[index].prompt.token_ids_L).all()


@pytest.mark.parametrize(
    ("rule", "positions"),
    [
        # two tokens of text, an image of 2 x 3 from position 2 on, one more token
        ("grid", [[0, 1, 2, 2, 2, 2, 2, 2, 5], [0, 1, 2, 2, 2, 3, 3, 3, 5], [0, 1, 2, 3, 4, 2, 3, 4, 5]]),
        ("time", [[0, 1, 2, 2, 2, 2, 2, 2, 5]] * 3),
        ("sequence", [[0, 1, 2, 3, 4, 5, 6, 7, 8]] * 3),
    ],
)
def test_positions_by_hand(rule: PositionRule, positions: list[list[int]]) -> None:
    family = family_of(tiny("qwen3_vl").network.config, "tiny")
    image = PromptImage(key="a", tensors={}, num_tokens=6, grid=(1, 4, 6), positions=rule)
    ids = np.array([1, 2, *[family.image_token_id] * 6, 3])
    found, following = family.positions(ids, (image,), 0)
    assert found.tolist() == positions
    assert following == found.max() + 1


def test_half_the_resolution_has_the_mean_of_each_two_pixels() -> None:
    ramp = replace(FIRST, tensors={"pixel_values": np.float32([[0, 1, 2, 3]])})
    found = {name: group for name, _, group in faulty_groups([group_of((4, ramp))], PAD)}
    pixels = found["images of half the resolution"].images[0].tensors["pixel_values"]
    assert pixels.tolist() == [[0.5, 0.5, 2.5, 2.5]]


def test_position_faults_name_their_rule() -> None:
    rules = {name: changed(name)[2].images for name in ("two of three M-RoPE rows dropped", "1-D positions")}
    assert [[image.positions for image in images] for images in rules.values()] == [["time"] * 3, ["sequence"] * 3]


@pytest.mark.parametrize("packed", [True, False])
def test_image_tokens_are_doubled_with_their_marks_where_positions_need_them(packed: bool) -> None:
    group = changed("image tokens doubled", packed=packed)[2]
    twice = [BEGIN, *[PAD] * 12, END] if packed else [BEGIN, *[PAD] * 6, END] * 2
    assert group.prompt.token_ids_L.tolist() == [4, *twice, *twice]
    assert keys(group) == ["a", "a", "b", "b", "c", "c"]
    (sample,) = group.samples
    assert sample.token_ids_T.tolist() == [1, 2, *twice, 5, 3]
    assert sample.token_ids_T[sample.mask_T].tolist() == [1, 2, 3]
    before = GROUPS[2].samples[0]
    assert (sample.rollout_logprobs_T[sample.mask_T] == before.rollout_logprobs_T[before.mask_T]).all()


def test_the_missing_image_is_the_last_of_the_prompt_or_of_the_later_turns() -> None:
    of_prompt, later = changed("the last image missing"), changed("a later turn's image missing")
    assert {index: [image.key for image in group.images] for index, group in of_prompt.items()} == {
        0: [],
        2: ["a", "c"],
    }
    assert of_prompt[2].prompt.token_ids_L.tolist() == [4, BEGIN, *[PAD] * 6, END, BEGIN, END]
    assert {index: [image.key for image in group.images] for index, group in later.items()} == {2: ["a", "b"]}
    assert later[2].samples[0].token_ids_T.tolist() == [1, 2, BEGIN, END, 5, 3]


def test_a_single_image_has_no_other() -> None:
    names = {name for name, _, _ in faulty_groups([GROUPS[0], GROUPS[1]], PAD)}
    assert "images of other prompts" not in names
    assert len(names) == 7
    assert not list(faulty_groups([GROUPS[1]], PAD))
