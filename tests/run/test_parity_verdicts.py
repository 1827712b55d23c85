"""The gate's verdicts on known faults: ruled out, found, or not to be told."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fovea.run.parity import kind_reading, summary_line
from fovea.run.parity_faults import PromptKind
from fovea.run.parity_reading import FaultReading, Gap, ParityReading, parity_failure
from tests.run.parity import tokens
from tests.tables import table


def fault_of(
    sound: float, faulty: float, votes: tuple[int, int] | None = None, name: str = "grey images"
) -> FaultReading:
    """A fault at these mean distances; `votes` are the tokens nearer to the sound trainer and to the fault.

    Without votes, all of 100 tokens are nearer to the smaller distance.
    """
    gaps = [Gap.of([0.0], [gap]) for gap in (sound, faulty)]
    nearer_sound, nearer_fault = votes or ((0, 100) if faulty < sound else (100, 0))
    return FaultReading(name=name, sound=gaps[0], faulty=gaps[1], nearer_sound=nearer_sound, nearer_fault=nearer_fault)


def reading_of(images: float, text: float, *faults: FaultReading, dtype: str = "float32") -> ParityReading:
    gaps: dict[PromptKind, float] = {"with images": images, "without images": text}
    kinds = [kind_reading(kind, 1, tokens([-1.0], [-1.0 + gap])) for kind, gap in gaps.items()]
    return ParityReading(
        model="m", engine="e", limit=0.1, max_k3=0.02, dtype=dtype, kinds=tuple(kinds), faults=tuple(faults)
    )


def test_a_fault_is_read_token_by_token() -> None:
    engine, sound = np.float32([-1.0, -2.0, -3.0, -4.0]), np.float32([-1.5, -2.0, -3.0, -3.0])
    faulty = np.float32([-1.0, -2.0, -3.5, -4.25])
    reading = FaultReading.of("f", engine, sound, faulty)
    assert reading.sound.mean_abs == pytest.approx((0.5 + 1.0) / 4)
    assert reading.faulty.mean_abs == pytest.approx((0.5 + 0.25) / 4)
    # nearer on the first and the last token, not on the third; the second is equal
    assert (reading.nearer_sound, reading.nearer_fault) == (1, 2)


@table(
    ("sound", "faulty", "votes", "verdict"),
    [
        (0.01, 0.031, (100, 0), "ruled out"),
        (0.01, 0.029, (100, 0), "cannot tell"),  # k3: 8 times
        (0.01, 0.031, (60, 40), "ruled out"),  # 2 standard deviations
        (0.01, 0.031, (59, 41), "cannot tell"),  # one token that is the mean
        (0.01, 0.031, (1, 0), "ruled out"),  # after a push, whose tokens differ from the second on
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
    fault = replace(fault_of(0.0, 1.0), sound=Gap(mean_abs=0.01, k3=0.001), faulty=Gap(mean_abs=0.02, k3=0.011))
    assert fault.ruled_out
    assert not replace(fault, faulty=Gap(mean_abs=0.02, k3=0.009)).ruled_out


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
def test_the_floor_follows_the_dtype(dtype: str, images: float, text: float, fault: FaultReading, passed: bool) -> None:
    reading = reading_of(images, text, fault, dtype=dtype)
    assert reading.passed is passed
    assert ("cannot tell: grey images" in summary_line(reading)) is (passed and not fault.ruled_out)


def test_the_error_names_the_nearest_fault() -> None:
    faults = fault_of(0.3, 0.01, name="1-D positions"), fault_of(0.3, 0.001, name="grey images")
    message = parity_failure(reading_of(0.3, 0.0, *faults))
    assert (
        "The engine seems to have this fault: grey images (0.001 from a trainer with it, 0.3 from the trainer as it "
        "is). Without images they agree" in message
    )
    unknown = parity_failure(reading_of(0.3, 0.0, fault_of(0.3, 0.2)))
    assert "No known fault explains it; the nearest is: grey images (0.2 from" in unknown
    assert "fault" not in parity_failure(reading_of(0.3, 0.0, fault_of(0.3, 0.4)))


def test_the_line_of_a_run_lists_what_it_cannot_tell() -> None:
    faults = fault_of(1e-6, 0.5, name="a"), fault_of(1e-6, 2e-6, name="b"), fault_of(1e-6, 1e-6, name="c")
    line = summary_line(reading_of(1e-6, 1e-6, *faults))
    assert line == "engine and trainer agree (1e-06, limit 0.1; cannot tell: c, b; parity.json)"


def test_few_tokens_after_a_push_are_judged_by_mean_and_stale_weights_only() -> None:
    """Images that differ a little more than texts are the gate's to judge, by more prompts."""
    reading = reading_of(0.03, 0.0, fault_of(0.03, 0.02, votes=(50, 60)), dtype="bfloat16")
    assert not reading.passed
    assert reading.push_violation is None
    assert reading_of(0.0, 0.0, fault_of(0.3, 0.001)).push_violation is not None
