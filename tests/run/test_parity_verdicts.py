"""The gate's verdicts by hand-made log-probs, and the faults that it imitates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fovea.models.families.registry import family_of
from fovea.run.parity import kind_mismatch, summary_line
from fovea.run.parity_faults import PromptKind, faulty_groups
from fovea.run.parity_result import FaultMismatch, KindMismatch, Mismatch, ParityResult, SampledToken, parity_failure
from fovea.types import PositionRule, Prompt, PromptImage, Sample, SampleGroup
from gym_tests.tables import table
from tests.tiny_models import tiny

KINDS: tuple[PromptKind, PromptKind] = ("with images", "without images")
FAR = [-1.0, -3.0, -1.0, -2.0], [-1.5, -1.0, -1.2, -2.0]
"""A mean difference of (0.5 + 2 + 0.2 + 0) / 4 = 0.675."""
ONE_FAR_OFF = [-1.0] * 50, [-1.0] * 49 + [1.0]
"""A mean difference of 2 / 50 = 0.04, and a k3 of (e^2 - 2 - 1) / 50 = 0.0878."""


def near(mismatch: float) -> tuple[list[float], list[float]]:
    return [-1.0] * 50, [-1.0 + mismatch] * 50


def kind_of(kind: PromptKind, logprobs: tuple[Sequence[float], Sequence[float]]) -> KindMismatch:
    """A result of tokens by the engine's log-probs and the trainer's."""
    tokens = [
        SampledToken(row=kind, number=number, token_id=number, text=str(number), engine_logprob=a, trainer_logprob=b)
        for number, (a, b) in enumerate(zip(*logprobs, strict=True), start=1)
    ]
    return kind_mismatch(kind, 1, tokens)


def reading_of(*kinds: KindMismatch, **fields: Any) -> ParityResult:
    given = {"limit": 0.1, "max_k3": 0.02, "dtype": "bfloat16", "faults": (), **fields}
    return ParityResult(model="m", engine="e", kinds=kinds, **given)


def with_faults(images: float, text: float, *faults: FaultMismatch, dtype: str = "float32") -> ParityResult:
    kinds = [kind_of(kind, near(mismatch)) for kind, mismatch in zip(KINDS, (images, text), strict=True)]
    return reading_of(*kinds, dtype=dtype, faults=faults)


def fault_of(
    sound: float, faulty: float, votes: tuple[int, int] | None = None, name: str = "grey images"
) -> FaultMismatch:
    """A fault at these mean distances; `votes` are the tokens nearer to the sound trainer and to the fault.

    Without votes, all of 100 tokens are nearer to the smaller distance.
    """
    nearer_sound, nearer_fault = votes or ((0, 100) if faulty < sound else (100, 0))
    mismatches: Any = {key: Mismatch.of([0.0], [x]) for key, x in (("sound", sound), ("faulty", faulty))}
    return FaultMismatch(name=name, **mismatches, nearer_sound=nearer_sound, nearer_fault=nearer_fault)


def test_the_figures_are_those_of_all_tokens_and_a_k3_that_is_no_number_is_beyond_any_limit() -> None:
    result = kind_of("with images", ([-1.0, -2.0], [-1.5, -1.0]))
    assert result.mean_abs == pytest.approx((0.5 + 1.0) / 2)
    # x = trainer - engine: e^-0.5 + 0.5 - 1 and e^1 - 1 - 1
    assert result.k3 == pytest.approx((0.1065307 + 0.7182818) / 2)
    assert (result.worst.number, result.worst.mismatch) == (2, 1.0)
    assert kind_of("with images", ([-1.0, -2.0, -9.0], [-1.0, float("nan"), -1.0])).worst.number == 2
    no_number = replace(kind_of("without images", near(0.0)), k3=float("nan"))
    assert not reading_of(no_number, max_k3=1e9).passed


@table("far", KINDS)
def test_the_worst_of_both_kinds_is_named(far: PromptKind) -> None:
    result = reading_of(*(kind_of(kind, FAR if kind == far else near(0.01)) for kind in KINDS), max_k3=100)
    assert not result.passed
    message = parity_failure(result)
    worst = f"the worst token is '2' (id 2), number 2 of a completion of {far}: -3.000 in the engine, -1.000 in"
    assert f"on prompts {far} the log-probs of the e engine and of the trainer differ by 0.675 on average" in message
    assert worst in message
    assert ("Without images they agree" in message) is (far == "with images")


@table("far", KINDS)
@table(("limit", "verdict"), [(0.674, "differ"), (0.676, "agree")])
def test_the_limit_is_on_the_worst_kind(limit: float, verdict: str, far: PromptKind) -> None:
    kinds = [kind_of(kind, FAR if kind == far else near(0.6)) for kind in KINDS]
    result = reading_of(*kinds, limit=limit, max_k3=100)
    assert result.passed is (verdict == "agree")
    assert summary_line(result) == f"engine and trainer {verdict} (0.7, limit {limit:g}; parity.json)"


@table("far", KINDS)
def test_few_tokens_that_are_far_off_are_beyond_the_limit_of_k3(far: PromptKind) -> None:
    result = reading_of(*(kind_of(kind, ONE_FAR_OFF if kind == far else near(0.03)) for kind in KINDS))
    assert result.worst.mean_abs == pytest.approx(0.04)
    assert not result.passed
    have = f"on prompts {far} the log-probs of the e engine and of the trainer have a k3 of 0.0878, and "
    assert f"{have}parity.max_abs_logprob_diff=0.1 allows up to 0.02;" in parity_failure(result)
    assert summary_line(result).startswith(f"engine and trainer differ (on prompts {far} they have a k3 of 0.0878")


@table(
    ("images", "text", "passed"),
    [
        (0.079, 1e-6, False),  # positions of words, on a solved model in float32
        (9e-6, 1e-6, True),  # rounding in float32
        (0.045, 0.03, True),  # two engines in bfloat16
        (0.015, 0.002, True),  # the same with texts that are nearly certain
        (0.001, 0.079, True),  # text alone is off, within the limit
    ],
)
def test_images_may_not_be_much_worse_than_text(images: float, text: float, passed: bool) -> None:
    result = reading_of(kind_of("with images", near(images)), kind_of("without images", near(text)))
    assert result.passed is passed
    assert reading_of(kind_of("with images", near(images))).passed, "there is nothing to compare with"
    if not passed:
        assert "differ by 0.079 on average, and by 1" in parity_failure(result)
        assert "Without images they agree" in parity_failure(result)


def test_a_fault_is_read_token_by_token() -> None:
    engine, sound = np.float32([-1.0, -2.0, -3.0, -4.0]), np.float32([-1.5, -2.0, -3.0, -3.0])
    faulty = np.float32([-1.0, -2.0, -3.5, -4.25])
    result = FaultMismatch.of("f", [(engine[:1], sound[:1], faulty[:1]), (engine[1:], sound[1:], faulty[1:])])
    assert result.sound.mean_abs == pytest.approx((0.5 + 1.0) / 4)
    assert result.faulty.mean_abs == pytest.approx((0.5 + 0.25) / 4)
    # nearer on the first and the last token, not on the third; the second is equal
    assert (result.nearer_sound, result.nearer_fault) == (1, 2)


@table(
    ("sound", "faulty", "votes", "verdict"),
    [
        (0.01, 0.031, (100, 0), "ruled out"),
        (0.01, 0.029, (100, 0), "cannot tell"),  # k3: 8 times
        (0.01, 0.031, (60, 40), "ruled out"),  # 2 standard deviations
        (0.01, 0.031, (59, 41), "cannot tell"),  # one token that is the mean
        (0.01, 0.031, (1, 0), "ruled out"),  # after a weight sync, whose tokens differ from the second on
        (0.01, 0.031, (2, 1), "cannot tell"),
        (0.031, 0.01, (0, 100), "found"),
        (0.029, 0.01, (0, 100), "cannot tell"),
        (0.031, 0.01, (0, 15), "cannot tell"),  # the mean of a few tokens
        (0.031, 0.01, (0, 16), "found"),
        (0.0, 0.0, (0, 0), "cannot tell"),  # a fault that moves nothing
        (0.01, float("nan"), (0, 0), "cannot tell"),
    ],
)
def test_a_factor_and_most_tokens_decide(sound: float, faulty: float, votes: tuple[int, int], verdict: str) -> None:
    fault = fault_of(sound, faulty, votes)
    assert (fault.ruled_out, fault.found) == (verdict == "ruled out", verdict == "found")


def test_k3_decides_where_few_tokens_differ() -> None:
    fault = replace(fault_of(0.0, 1.0), sound=Mismatch(mean_abs=0.01, k3=0.001))
    for k3, ruled_out in ((0.011, True), (0.009, False)):
        assert replace(fault, faulty=Mismatch(mean_abs=0.02, k3=k3)).ruled_out is ruled_out


@table(
    ("dtype", "images", "text", "fault", "passed"),
    [
        # M-RoPE rows dropped on a model that was trained: the mean is far below parity.max_abs_logprob_diff
        ("float32", 0.0077, 1e-6, fault_of(0.0077, 1e-6), False),
        ("bfloat16", 0.0077, 0.001, fault_of(0.0077, 0.001), False),
        ("bfloat16", 0.0077, 0.006, fault_of(0.0077, 0.006), True),  # lost in rounding, and said
        ("float32", 3e-4, 1e-6, fault_of(3e-4, 2e-4), False),  # more than rounding, by whatever fault
        ("float32", 9e-5, 1e-6, fault_of(9e-5, 8e-5), True),
        ("float32", 3e-4, 1e-6, fault_of(3e-4, 0.5), True),  # an engine that is this inexact, and sees the images
        ("bfloat16", 0.045, 0.03, fault_of(0.045, 0.05), True),
    ],
)
def test_the_floor_is_by_dtype(dtype: str, images: float, text: float, fault: FaultMismatch, passed: bool) -> None:
    result = with_faults(images, text, fault, dtype=dtype)
    assert result.passed is passed
    assert ("cannot tell: grey images" in summary_line(result)) is (passed and not fault.ruled_out)


def test_the_error_names_the_nearest_fault() -> None:
    faults = fault_of(0.3, 0.01, name="1-D positions"), fault_of(0.3, 0.001, name="grey images")
    message = parity_failure(with_faults(0.3, 0.0, *faults))
    named = (
        "seems to have this fault: grey images (0.001 from a trainer with it, 0.3 from the trainer as it is). Without"
    )
    assert f"The engine {named} images they agree" in message
    unknown = parity_failure(with_faults(0.3, 0.0, fault_of(0.3, 0.2)))
    assert "No known fault explains it; the nearest is: grey images (0.2 from" in unknown
    assert "fault" not in parity_failure(with_faults(0.3, 0.0, fault_of(0.3, 0.4)))


def test_the_line_of_a_run_lists_what_it_cannot_tell() -> None:
    faults = fault_of(1e-6, 0.5, name="a"), fault_of(1e-6, 2e-6, name="b"), fault_of(1e-6, 1e-6, name="c")
    line = summary_line(with_faults(1e-6, 1e-6, *faults))
    assert line == "engine and trainer agree (1e-06, limit 0.1; cannot tell: c, b; parity.json)"


def test_few_tokens_after_a_weight_sync_are_judged_by_mean_and_stale_weights_only() -> None:
    """Images that differ a little more than texts are the gate's to judge, by more prompts."""
    result = with_faults(0.03, 0.0, fault_of(0.03, 0.02, votes=(50, 60)), dtype="bfloat16")
    assert (result.passed, result.sync_violation) == (False, None)
    assert with_faults(0.0, 0.0, fault_of(0.3, 0.001)).sync_violation is not None


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


def pixels(group: SampleGroup) -> list[float]:
    return [float(image.tensors["pixel_values"][0, 0]) for image in group.images]


@table(
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
        same = [a.key == b.key for a, b in zip(group.images, GROUPS[index].images, strict=True)]
        kept = [a == b for a, b in zip(pixels(group), pixels(GROUPS[index]), strict=True)]
        assert same == kept
        assert (group.prompt.token_ids_L == GROUPS[index].prompt.token_ids_L).all()


@table(
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


@table("packed", [True, False])
def test_image_tokens_are_doubled_with_their_marks_where_positions_need_them(packed: bool) -> None:
    group = changed("image tokens doubled", packed=packed)[2]
    twice = [BEGIN, *[PAD] * 12, END] if packed else [BEGIN, *[PAD] * 6, END] * 2
    assert group.prompt.token_ids_L.tolist() == [4, *twice, *twice]
    assert "".join(image.key for image in group.images) == "aabbcc"
    (sample,) = group.samples
    assert sample.token_ids_T.tolist() == [1, 2, *twice, 5, 3]
    assert sample.token_ids_T[sample.mask_T].tolist() == [1, 2, 3]
    before = GROUPS[2].samples[0]
    assert (sample.rollout_logprobs_T[sample.mask_T] == before.rollout_logprobs_T[before.mask_T]).all()


def test_the_missing_image_is_the_last_of_the_prompt_or_of_the_later_turns() -> None:
    of_prompt, later = changed("the last image missing"), changed("a later turn's image missing")
    left = [{i: "".join(x.key for x in each.images) for i, each in found.items()} for found in (of_prompt, later)]
    assert left == [{0: "", 2: "ac"}, {2: "ab"}]
    assert of_prompt[2].prompt.token_ids_L.tolist() == [4, BEGIN, *[PAD] * 6, END, BEGIN, END]
    assert later[2].samples[0].token_ids_T.tolist() == [1, 2, BEGIN, END, 5, 3]


def test_a_single_image_has_no_other() -> None:
    names = {name for name, _, _ in faulty_groups([GROUPS[0], GROUPS[1]], PAD)}
    assert ("images of other prompts" in names, len(names)) == (False, 7)
    assert not list(faulty_groups([GROUPS[1]], PAD))
