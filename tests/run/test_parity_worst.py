"""The gate names the kind of prompt that is furthest off, and of it the token that is; whichever kind comes first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fovea.run.parity import kind_reading, summary_line
from fovea.run.parity_faults import PromptKind
from fovea.run.parity_reading import KindReading, ParityReading, parity_failure
from tests.run.parity import tokens

NEAR = [-1.0, -1.01, -1.02], [-1.0, -1.0, -1.0]
FAR = [-1.0, -3.0, -1.0, -2.0], [-1.5, -1.0, -1.2, -2.0]


def near(gap: float) -> tuple[list[float], list[float]]:
    """Fifty tokens that all differ by `gap`."""
    return [-1.0] * 50, [-1.0 + gap] * 50


def kind_of(kind: PromptKind, logprobs: tuple[list[float], list[float]]) -> KindReading:
    return kind_reading(kind, 1, [replace(token, row=kind, text=str(token.number)) for token in tokens(*logprobs)])


def reading_of(*kinds: KindReading, limit: float = 0.1, max_k3: float = 100) -> ParityReading:
    return ParityReading(model="m", engine="e", limit=limit, max_k3=max_k3, dtype="bfloat16", kinds=kinds)


@pytest.mark.parametrize("far", ["with images", "without images"])
def test_the_worst_of_both_kinds_is_named(far: PromptKind) -> None:
    kinds: tuple[PromptKind, ...] = ("with images", "without images")
    reading = reading_of(*(kind_of(kind, FAR if kind == far else NEAR) for kind in kinds))
    assert not reading.passed
    assert (reading.worst.kind, reading.worst.worst.number) == (far, 2)
    message = parity_failure(reading)
    # (0.5 + 2 + 0.2 + 0) / 4
    assert f"on prompts {far} the log-probs of the e engine and of the trainer differ by 0.675 on average" in message
    assert f"worst is token '2' (id 2), number 2 of a completion of {far}: -3.000 in the engine, -1.000 in" in message
    assert ("Without images they agree" in message) is (far == "with images")


@pytest.mark.parametrize(("limit", "passed"), [(0.674, False), (0.676, True)])
def test_the_limit_is_on_the_worst_kind(limit: float, passed: bool) -> None:
    for kinds in ((near(0.3), FAR), (FAR, near(0.3))):
        named = [kind_of(name, each) for name, each in zip(("with images", "without images"), kinds, strict=True)]  # type: ignore[arg-type]
        assert reading_of(*named, limit=limit).passed is passed


@pytest.mark.parametrize(("limit", "verdict"), [(0.6, "differ"), (0.7, "agree")])
def test_the_line_of_a_run_says_it_for_people(limit: float, verdict: str) -> None:
    reading = reading_of(kind_of("with images", FAR), kind_of("without images", near(0.3)), limit=limit)
    assert summary_line(reading) == f"engine and trainer {verdict} (0.7, limit {limit:g}; parity.json)"


ONE_FAR_OFF = [-1.0] * 50, [-1.0] * 49 + [1.0]
"""A mean difference of 2 / 50 = 0.04, and a k3 of (e^2 - 2 - 1) / 50 = 0.0878."""


@pytest.mark.parametrize("far", ["with images", "without images"])
def test_few_tokens_that_are_far_off_are_beyond_the_limit_of_k3(far: PromptKind) -> None:
    kinds: tuple[PromptKind, ...] = ("with images", "without images")
    reading = reading_of(*(kind_of(kind, ONE_FAR_OFF if kind == far else near(0.03)) for kind in kinds), max_k3=0.02)
    assert reading.worst.mean_abs == pytest.approx(0.04)
    assert not reading.passed
    assert (
        f"on prompts {far} the log-probs of the e engine and of the trainer have a k3 of 0.0878, and "
        "parity.max_abs_logprob_diff=0.1 stands for up to 0.02;"
    ) in parity_failure(reading)
    assert summary_line(reading).startswith(f"engine and trainer differ (on prompts {far} they have a k3 of 0.0878")


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
    reading = reading_of(kind_of("with images", near(images)), kind_of("without images", near(text)))
    assert reading.passed is passed
    assert reading_of(kind_of("with images", near(images))).passed, "there is nothing to compare with"
    if not passed:
        assert "differ by 0.079 on average, and by 1" in parity_failure(reading)
        assert "Without images they agree" in parity_failure(reading)
