"""Weights at each level by hand; equal log-probs are the identity."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fovea.algorithms.importance import Level, importance_weights
from fovea.algorithms.policy_loss import clipped_loss

LEVELS: list[Level] = ["token", "sequence", "sequence_mask"]
LENGTHS = [2, 1, 2]
LOG_RATIOS = torch.tensor([0.2, 0.3, 1.0, -2.0, 0.5])


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        # e^.2, e^.3, e^1 capped, e^-2, e^.5
        ("token", [1.221403, 1.349859, 2.0, 0.135335, 1.648721]),
        # sums .5, 1.0, -1.5: 1.648721, 2.718282, .223130
        ("sequence", [1.648721, 1.648721, 2.0, 0.223130, 0.223130]),
        ("sequence_mask", [1.648721, 1.648721, 0.0, 0.223130, 0.223130]),
    ],
)
def test_numbers_by_hand(level: Level, expected: list[float]) -> None:
    old = (LOG_RATIOS - 3).requires_grad_()
    result = importance_weights(old, torch.full((5,), -3.0), LENGTHS, level=level, cap=2.0)
    torch.testing.assert_close(result.weights_A, torch.tensor(expected), atol=1e-5, rtol=1e-5)
    assert not result.weights_A.requires_grad
    assert result.capped_A.tolist() == [False, False, True, False, False]


@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.floats(-30, 0, width=32), max_size=5), min_size=1, max_size=5))
def test_equal_logprobs_are_the_identity(level: Level, completions: list[list[float]]) -> None:
    logprobs = torch.tensor([lp for completion in completions for lp in completion])
    for cap in (1.0, 2.0):
        result = importance_weights(logprobs, logprobs.clone(), list(map(len, completions)), level=level, cap=cap)
        assert result.weights_A.tolist() == [1.0] * len(logprobs)
        assert not result.capped_A.any(), "a cap of 1 takes nothing off a weight of 1"


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("log_ratio", [-500.0, 500.0])
def test_nothing_overflows(level: Level, log_ratio: float) -> None:
    result = importance_weights(torch.full((3,), log_ratio), torch.zeros(3), [2, 1], level=level, cap=2.0)
    assert torch.isfinite(result.weights_A).all()
    assert (result.weights_A <= 2.0).all()


def test_a_weight_is_the_same_as_a_scaled_advantage() -> None:
    lp, old, advantages = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    weights = importance_weights(old, old - LOG_RATIOS, LENGTHS, level="token", cap=2.0).weights_A
    bounds = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}
    torch.testing.assert_close(
        clipped_loss(lp, old, advantages, **bounds).loss_A * weights,
        clipped_loss(lp, old, advantages * weights, **bounds).loss_A,
    )
