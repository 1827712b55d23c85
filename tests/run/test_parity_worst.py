"""The gate names the kind of prompt that is furthest off, and of it the token that is; whichever kind comes first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fovea.run.parity import KindReading, ParityReading, _reading, parity_failure, summary_line
from fovea.run.parity_rows import PromptKind
from tests.run.test_parity import tokens

NEAR = [-1.0, -1.01, -1.02], [-1.0, -1.0, -1.0]
FAR = [-1.0, -3.0, -1.0, -2.0], [-1.5, -1.0, -1.2, -2.0]


def kind_of(kind: PromptKind, logprobs: tuple[list[float], list[float]]) -> KindReading:
    return _reading(kind, 1, [replace(token, row=kind, text=str(token.number)) for token in tokens(*logprobs)])


def reading_of(*kinds: KindReading, limit: float = 0.1) -> ParityReading:
    return ParityReading(model="m", engine="e", limit=limit, kinds=kinds)


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
    for kinds in ((NEAR, FAR), (FAR, NEAR)):
        named = [kind_of(name, each) for name, each in zip(("with images", "without images"), kinds, strict=True)]  # type: ignore[arg-type]
        assert reading_of(*named, limit=limit).passed is passed


@pytest.mark.parametrize(("limit", "verdict"), [(0.6, "differ"), (0.7, "agree")])
def test_the_line_of_a_run_says_it_for_people(limit: float, verdict: str) -> None:
    reading = reading_of(kind_of("with images", FAR), kind_of("without images", NEAR), limit=limit)
    assert summary_line(reading) == f"engine and trainer {verdict} (0.7, limit {limit:g}; parity.json)"
