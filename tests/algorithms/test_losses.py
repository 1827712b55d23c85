"""The clipped loss and the k3 estimate, by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fovea.algorithms.importance import importance_weights
from fovea.algorithms.kl import k3
from fovea.algorithms.policy_loss import clipped_loss


def loss_of(ratio: float, advantage: float, dual_clip: float | None = 3.0) -> float:
    result = clipped_loss(
        torch.tensor([math.log(ratio)]),
        torch.zeros(1),
        torch.tensor([advantage]),
        clip_low=0.2,
        clip_high=0.28,
        dual_clip=dual_clip,
    )
    return float(result.loss_A)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.0, 2.0, -2.0),  # on-policy: -A
        (1.1, 2.0, -2.2),  # inside: -A r
        (1.5, 2.0, -2.56),  # good token, ratio beyond 1.28: clipped
        (0.5, 2.0, -1.0),  # good token that became rarer: not clipped, max(-1.0, -1.6)
        (0.5, -1.0, 0.8),  # bad token, ratio below 0.8: clipped
        (2.0, -1.0, 2.0),  # bad token that became likelier: not clipped
        (9.0, -1.0, 3.0),  # and beyond the dual clip: 3 |A|
        (9.0, 1.0, -1.28),
    ],
)
def test_numbers_by_hand(ratio: float, advantage: float, expected: float) -> None:
    assert loss_of(ratio, advantage) == pytest.approx(expected, rel=1e-5)


def test_without_dual_clip_a_bad_token_has_no_bound() -> None:
    assert loss_of(9.0, -1.0, dual_clip=None) == pytest.approx(9.0, rel=1e-5)


def test_clipped_tokens_have_no_gradient_and_are_counted() -> None:
    logprobs = torch.tensor([0.5, -0.5, 0.1, 3.0], requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    result = clipped_loss(logprobs, torch.zeros(4), advantages, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    result.loss_A.sum().backward()
    assert logprobs.grad is not None
    assert (logprobs.grad != 0).tolist() == [False, False, True, False]
    assert result.clipped_high_A.tolist() == [True, False, False, False]
    assert result.clipped_low_A.tolist() == [False, True, False, False]


def test_on_policy_gradient_is_minus_the_advantage() -> None:
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    advantages = torch.tensor([0.7, -1.3])
    result = clipped_loss(logprobs, logprobs.detach(), advantages, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    result.loss_A.sum().backward()
    torch.testing.assert_close(logprobs.grad, -advantages)


@given(st.floats(-300, 300))
def test_nothing_overflows(log_ratio: float) -> None:
    for advantage in (1.0, -1.0):
        result = clipped_loss(
            torch.tensor([log_ratio]), torch.zeros(1), torch.tensor([advantage]), clip_low=0.2, clip_high=0.2,
            dual_clip=None,
        )  # fmt: skip
        assert torch.isfinite(result.loss_A).all()
    assert 0 <= float(k3(torch.tensor([log_ratio]), torch.zeros(1))) <= 10


def test_k3_by_hand() -> None:
    # x = -0.5: e^-0.5 + 0.5 - 1
    assert float(k3(torch.tensor([-1.0]), torch.tensor([-1.5]))) == pytest.approx(0.1065307, rel=1e-4)
    assert float(k3(torch.tensor([-1.0]), torch.tensor([-1.0]))) == 0.0


def test_importance_weights_are_the_ratio_up_to_the_cap() -> None:
    old = torch.tensor([-1.0, -1.0, -1.0, -3.0], requires_grad=True)
    rollout = torch.tensor([-1.0, -1.5, -3.0, -1.0])
    weights = importance_weights(old, rollout, [len(old)], level="token", cap=2.0).weights_A
    # e^0, e^0.5, e^2 capped, e^-2: no lower bound
    torch.testing.assert_close(weights, torch.tensor([1.0, 1.6487213, 2.0, 0.1353353]))
    assert not weights.requires_grad
