"""The small and the large numbers that keep the formulas finite, each from both of its sides."""

from __future__ import annotations

from math import exp

import pytest
import torch

from fovea.algorithms.advantage import grpo, has_signal
from fovea.algorithms.gae import whiten
from fovea.algorithms.importance import Level, importance_weights
from fovea.algorithms.kl import k3
from fovea.algorithms.policy_loss import clipped_loss, gspo_loss
from fovea.algorithms.ratio import clamp_log, ratios

LARGEST = exp(20)
BOUNDS = {"clip_low": 0.2, "clip_high": 0.2}


def test_rewards_are_equal_within_a_millionth() -> None:
    rewards = torch.tensor([[0.5, 0.5 + 5e-7], [0.5, 0.5 + 3e-6], [0.5, 0.5 + 5e-4]])
    assert has_signal(rewards).tolist() == [False, True, True]
    first, _, third = grpo(rewards).tolist()
    assert first == [0, 0]
    # deviations of 2.5e-4 by 5e-4 / sqrt(2)
    assert third == pytest.approx([-0.70711, 0.70711], rel=1e-2)


def test_the_least_deviation_of_a_group() -> None:
    """0.5e-4 / (1e-4 / sqrt(2) + 1e-6)."""
    advantages = grpo(torch.tensor([[0.1, 0.1001]], dtype=torch.float64))
    assert advantages.tolist()[0] == pytest.approx([-0.69725, 0.69725], rel=1e-4)


def test_the_least_variance_of_what_is_whitened() -> None:
    """Unbiased variance 2e-8 of -1e-4 and 1e-4: 1e-4 / sqrt(2e-8 + 1e-8)."""
    x = torch.tensor([[-1e-4, 1e-4]])
    torch.testing.assert_close(whiten(x, torch.ones(1, 2)), torch.tensor([[-0.57735, 0.57735]]), atol=1e-4, rtol=0)


def test_a_log_ratio_ends_at_20_and_has_no_gradient_beyond() -> None:
    logs = torch.tensor([-25.0, -19.0, 19.0, 25.0], requires_grad=True)
    assert clamp_log(logs).tolist() == [-20, -19, 19, 20]
    assert ratios(logs).tolist() == pytest.approx([exp(-20), exp(-19), exp(19), exp(20)], rel=1e-4)
    ratios(logs).sum().backward()
    assert logs.grad is not None
    assert (logs.grad != 0).tolist() == [False, True, True, False]


@pytest.mark.parametrize("log_ratio", [30.0, 70.0])
def test_the_largest_loss_of_a_bad_token(log_ratio: float) -> None:
    """Without a dual clip; gspo's is of the mean over the completion."""
    one, bad = torch.tensor([log_ratio]), torch.tensor([-1.0])
    assert float(clipped_loss(one, 0 * one, bad, dual_clip=None, **BOUNDS).loss_A) == pytest.approx(LARGEST, rel=1e-4)
    two = torch.tensor([-10.0, 2 * log_ratio + 10])
    whole = gspo_loss(two, 0 * two, bad.expand(2), [2], dual_clip=None, **BOUNDS)
    assert whole.loss_A.tolist() == whole.ratio_A.tolist() == pytest.approx([LARGEST] * 2, rel=1e-4)


def test_one_token_far_off_does_not_clamp_a_completion_that_is_near() -> None:
    """The mean is clamped, and not its parts: (50 - 47) / 2 = 1.5."""
    logs = torch.tensor([50.0, -47.0])
    ratio = gspo_loss(logs, 0 * logs, torch.ones(2), [2], dual_clip=None, **BOUNDS).ratio_A
    assert ratio.tolist() == pytest.approx([exp(1.5)] * 2, rel=1e-4)


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_mask"])
def test_the_largest_weight_for_the_engine(level: Level) -> None:
    weights = importance_weights(torch.tensor([60.0]), torch.zeros(1), [1], level=level, cap=1e30).weights_A
    assert weights.tolist() == pytest.approx([LARGEST], rel=1e-4)


def test_a_k3_ends_at_10() -> None:
    """e^2.5 - 3.5 = 8.68 is below, e^2.7 - 3.7 = 11.18 above it; 9.5 of -10.5 is below, 11 of -12 above."""
    other = torch.tensor([2.5, 2.7, 30.0, -10.5, -12.0, -500.0])
    assert k3(torch.zeros(6), other).tolist() == pytest.approx([exp(2.5) - 3.5, 10, 10, 9.5, 10, 10], abs=1e-3)
