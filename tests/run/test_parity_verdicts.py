"""The gate's verdicts by hand-made log-probs: on the kinds of prompts, their worst tokens, and known faults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from fovea.run.parity import kind_mismatch, summary_line
from fovea.run.parity_faults import PromptKind
from fovea.run.parity_result import FaultMismatch, KindMismatch, Mismatch, ParityResult, SampledToken, parity_failure
from gym_tests.tables import table

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


def reading_of(
    *kinds: KindMismatch,
    limit: float = 0.1,
    max_k3: float = 0.02,
    dtype: str = "bfloat16",
    faults: Sequence[FaultMismatch] = (),
) -> ParityResult:
    return ParityResult(
        model="m", engine="e", limit=limit, max_k3=max_k3, dtype=dtype, kinds=kinds, faults=tuple(faults)
    )


def with_faults(images: float, text: float, *faults: FaultMismatch, dtype: str = "float32") -> ParityResult:
    kinds = [kind_of(kind, near(mismatch)) for kind, mismatch in zip(KINDS, (images, text), strict=True)]
    return reading_of(*kinds, dtype=dtype, faults=faults)


def fault_of(
    sound: float, faulty: float, votes: tuple[int, int] | None = None, name: str = "grey images"
) -> FaultMismatch:
    """A fault at these mean distances; `votes` are the tokens nearer to the sound trainer and to the fault.

    Without votes, all of 100 tokens are nearer to the smaller distance.
    """
    mismatches = [Mismatch.of([0.0], [mismatch]) for mismatch in (sound, faulty)]
    nearer_sound, nearer_fault = votes or ((0, 100) if faulty < sound else (100, 0))
    return FaultMismatch(
        name=name, sound=mismatches[0], faulty=mismatches[1], nearer_sound=nearer_sound, nearer_fault=nearer_fault
    )


def test_the_figures_are_those_of_all_tokens() -> None:
    result = kind_of("with images", ([-1.0, -2.0], [-1.5, -1.0]))
    assert result.mean_abs == pytest.approx((0.5 + 1.0) / 2)
    # x = trainer - engine: e^-0.5 + 0.5 - 1 and e^1 - 1 - 1
    assert result.k3 == pytest.approx((0.1065307 + 0.7182818) / 2)
    assert (result.worst.number, result.worst.mismatch) == (2, 1.0)
    assert kind_of("with images", ([-1.0, -2.0, -9.0], [-1.0, float("nan"), -1.0])).worst.number == 2


@pytest.mark.parametrize("far", KINDS)
def test_the_worst_of_both_kinds_is_named(far: PromptKind) -> None:
    result = reading_of(*(kind_of(kind, FAR if kind == far else near(0.01)) for kind in KINDS), max_k3=100)
    assert not result.passed
    message = parity_failure(result)
    assert f"on prompts {far} the log-probs of the e engine and of the trainer differ by 0.675 on average" in message
    assert (
        f"the worst token is '2' (id 2), number 2 of a completion of {far}: -3.000 in the engine, -1.000 in" in message
    )
    assert ("Without images they agree" in message) is (far == "with images")


@pytest.mark.parametrize("far", KINDS)
@pytest.mark.parametrize(("limit", "verdict"), [(0.674, "differ"), (0.676, "agree")])
def test_the_limit_is_on_the_worst_kind(limit: float, verdict: str, far: PromptKind) -> None:
    kinds = [kind_of(kind, FAR if kind == far else near(0.6)) for kind in KINDS]
    result = reading_of(*kinds, limit=limit, max_k3=100)
    assert result.passed is (verdict == "agree")
    assert summary_line(result) == f"engine and trainer {verdict} (0.7, limit {limit:g}; parity.json)"


@pytest.mark.parametrize("far", KINDS)
def test_few_tokens_that_are_far_off_are_beyond_the_limit_of_k3(far: PromptKind) -> None:
    result = reading_of(*(kind_of(kind, ONE_FAR_OFF if kind == far else near(0.03)) for kind in KINDS))
    assert result.worst.mean_abs == pytest.approx(0.04)
    assert not result.passed
    assert (
        f"on prompts {far} the log-probs of the e engine and of the trainer have a k3 of 0.0878, and "
        "parity.max_abs_logprob_diff=0.1 allows up to 0.02;"
    ) in parity_failure(result)
    assert summary_line(result).startswith(f"engine and trainer differ (on prompts {far} they have a k3 of 0.0878")


def test_a_k3_that_is_no_number_is_beyond_any_limit() -> None:
    kind = replace(kind_of("without images", near(0.0)), k3=float("nan"))
    assert not reading_of(kind, max_k3=1e9).passed


@pytest.mark.parametrize(
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
def test_a_factor_of_three_and_most_tokens_decide(
    sound: float, faulty: float, votes: tuple[int, int], verdict: str
) -> None:
    fault = fault_of(sound, faulty, votes)
    assert (fault.ruled_out, fault.found) == (verdict == "ruled out", verdict == "found")


def test_k3_decides_where_few_tokens_differ() -> None:
    fault = replace(
        fault_of(0.0, 1.0), sound=Mismatch(mean_abs=0.01, k3=0.001), faulty=Mismatch(mean_abs=0.02, k3=0.011)
    )
    assert fault.ruled_out
    assert not replace(fault, faulty=Mismatch(mean_abs=0.02, k3=0.009)).ruled_out


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
def test_the_floor_follows_the_dtype(
    dtype: str, images: float, text: float, fault: FaultMismatch, passed: bool
) -> None:
    result = with_faults(images, text, fault, dtype=dtype)
    assert result.passed is passed
    assert ("cannot tell: grey images" in summary_line(result)) is (passed and not fault.ruled_out)


def test_the_error_names_the_nearest_fault() -> None:
    faults = fault_of(0.3, 0.01, name="1-D positions"), fault_of(0.3, 0.001, name="grey images")
    message = parity_failure(with_faults(0.3, 0.0, *faults))
    assert (
        "The engine seems to have this fault: grey images (0.001 from a trainer with it, 0.3 from the trainer as it "
        "is). Without images they agree" in message
    )
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
    assert not result.passed
    assert result.sync_violation is None
    assert with_faults(0.0, 0.0, fault_of(0.3, 0.001)).sync_violation is not None
