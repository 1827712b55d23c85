"""Group advantages: numbers by hand, and exact zeros where a group says nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fovea.algorithms.advantage import dr_grpo, grpo, has_signal


def test_numbers_by_hand() -> None:
    # mean 0.5, deviations -.5 .5 .5 -.5, unbiased variance 1/3, std .57735
    advantages = grpo(torch.tensor([[0.0, 1.0, 1.0, 0.0]]))
    expected = torch.tensor([[-0.866024, 0.866024, 0.866024, -0.866024]])
    torch.testing.assert_close(advantages, expected, atol=1e-5, rtol=0)
    centred = dr_grpo(torch.tensor([[0.1, 1.0, 0.1]]))
    torch.testing.assert_close(centred, torch.tensor([[-0.3, 0.6, -0.3]]))


@given(st.floats(-10, 10, width=32), st.integers(2, 16))
def test_equal_rewards_give_exactly_zero(reward: float, n: int) -> None:
    rewards = torch.full((1, n), reward)
    assert not has_signal(rewards).any()
    assert grpo(rewards).tolist() == [[0.0] * n]


def test_the_trap_that_the_tolerance_is_for() -> None:
    rewards = torch.full((1, 5), 0.1)
    assert (rewards - rewards.mean(1, keepdim=True)).abs().max() > 0 or torch.equal(
        rewards.mean(1), torch.tensor([0.1])
    )
    assert grpo(rewards).abs().max() == 0


@given(st.lists(st.sampled_from([0.0, 0.1, 0.9, 1.0]), min_size=2, max_size=12))
def test_a_group_adds_up_to_zero_and_does_not_feel_its_neighbours(rewards: list[float]) -> None:
    alone = grpo(torch.tensor([rewards]))
    assert abs(float(alone.sum())) < 1e-4
    beside = grpo(torch.tensor([rewards, [1.0] * len(rewards)]))
    torch.testing.assert_close(beside[:1], alone)


def test_signal_is_by_group() -> None:
    assert has_signal(torch.tensor([[0.0, 1.0], [0.5, 0.5], [0.1, 0.1 + 1e-8]])).tolist() == [
        True,
        False,
        False,
    ]


@pytest.mark.parametrize("scale", [0.5, 3.0])
def test_normalised_advantages_do_not_depend_on_the_scale_of_rewards(scale: float) -> None:
    rewards = torch.tensor([[0.0, 0.5, 1.0, 1.0]])
    first, second = (grpo(r) for r in (rewards, rewards * scale))
    torch.testing.assert_close(first, second, atol=1e-4, rtol=0)
