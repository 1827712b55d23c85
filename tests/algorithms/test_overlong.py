"""The overlong penalty by hand."""

from __future__ import annotations

import pytest

from fovea.algorithms.advantage import overlong_penalty


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (0, 0.0),
        (80, 0.0),  # 100 - 20: where the buffer begins
        (85, -0.125),  # 5 of 20, times a half
        (100, -0.5),  # at the limit the whole factor
    ],
)
def test_numbers_by_hand(length: int, expected: float) -> None:
    assert overlong_penalty(length, max_tokens=100, buffer_tokens=20, factor=0.5) == pytest.approx(expected)
