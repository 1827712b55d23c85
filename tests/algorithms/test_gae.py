"""GAE and the critic's loss by hand, by their definitions, and with garbage where nothing may look."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fovea.algorithms.gae import gae, whiten
from fovea.algorithms.value_loss import explained_variance, value_loss

RNG = torch.Generator().manual_seed(0)


def test_numbers_by_hand() -> None:
    # gamma .5, lambda .8, so gamma lambda = .4; rewards 0 0 1, values .2 .4 .6
    # t=2: delta = 1 + .5*0 - .6 = .4,   A = .4
    # t=1: delta = 0 + .5*.6 - .4 = -.1, A = -.1 + .4*.4 = .06
    # t=0: delta = 0 + .5*.4 - .2 = 0,   A = 0 + .4*.06 = .024
    advantages, returns = gae(
        torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.2, 0.4, 0.6]]), torch.ones(1, 3), gamma=0.5, gae_lambda=0.8
    )
    torch.testing.assert_close(advantages, torch.tensor([[0.024, 0.06, 0.4]]))
    torch.testing.assert_close(returns, torch.tensor([[0.224, 0.46, 1.0]]))


def test_masked_tokens_are_passed_over_by_hand() -> None:
    # actions at 0, 2 and 3; the tool's token at 1 and the padding at 4 hold anything, NaN too
    # t=3: A = 1 - .6 = .4; t=2: -.1 + .16 = .06; t=1: carried; t=0: delta uses V of t=2 (.4), A = 0 + .4*.06
    nan = math.nan
    advantages, returns = gae(
        torch.tensor([[0.0, nan, 0.0, 1.0, 7.0]]),
        torch.tensor([[0.2, 9.0, 0.4, 0.6, nan]]),
        torch.tensor([[1, 0, 1, 1, 0]]),
        gamma=0.5,
        gae_lambda=0.8,
    )
    torch.testing.assert_close(advantages, torch.tensor([[0.024, 0.0, 0.06, 0.4, 0.0]]))
    torch.testing.assert_close(returns, torch.tensor([[0.224, 0.0, 0.46, 1.0, 0.0]]))


def by_definition(
    rewards: list[float], values: list[float], gamma: float, gae_lambda: float
) -> tuple[list[float], list[float]]:
    """A_t = sum over k of (gamma lambda)^k delta_{t+k}, in Python floats, of the actions only."""
    following = [*values, 0.0][1:]
    deltas = [r + gamma * v_next - v for r, v_next, v in zip(rewards, following, values, strict=True)]
    advantages = [
        math.fsum((gamma * gae_lambda) ** k * delta for k, delta in enumerate(deltas[t:])) for t in range(len(deltas))
    ]
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


NUMBERS = st.floats(-2, 2)
TOKENS = st.lists(st.tuples(NUMBERS, NUMBERS, st.booleans()), min_size=1, max_size=12)


@settings(max_examples=50, deadline=None)
@given(st.lists(TOKENS, min_size=1, max_size=3), st.floats(0, 1), st.floats(0, 1))
def test_equals_the_discounted_sum_of_deltas_over_actions(
    rows: list[list[tuple[float, float, bool]]], gamma: float, gae_lambda: float
) -> None:
    longest = max(map(len, rows))
    padded = torch.tensor([[*row, *[(5.0, -5.0, False)] * (longest - len(row))] for row in rows], dtype=torch.float64)
    rewards, values, mask = padded[..., 0], padded[..., 1], padded[..., 2].bool()
    advantages, returns = gae(rewards, values, mask, gamma=gamma, gae_lambda=gae_lambda)
    for b, row in enumerate(rows):
        actions = [(r, v) for r, v, is_action in row if is_action]
        expected_a, expected_r = by_definition([r for r, _ in actions], [v for _, v in actions], gamma, gae_lambda)
        assert advantages[b][mask[b]].tolist() == pytest.approx(expected_a, abs=1e-9)
        assert returns[b][mask[b]].tolist() == pytest.approx(expected_r, abs=1e-9)
    assert (advantages[~mask] == 0).all()
    assert (returns[~mask] == 0).all()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=12))
def test_gamma_and_lambda_of_one_give_reward_to_go_minus_value(tokens: list[tuple[float, float]]) -> None:
    rewards, values = torch.tensor(tokens, dtype=torch.float64).T[:, None]
    advantages, returns = gae(rewards, values, torch.ones_like(rewards), gamma=1.0, gae_lambda=1.0)
    reward_to_go = rewards.flip(1).cumsum(1).flip(1)
    torch.testing.assert_close(advantages, reward_to_go - values, atol=1e-9, rtol=0)
    torch.testing.assert_close(returns, reward_to_go, atol=1e-9, rtol=0)


@pytest.mark.parametrize("garbage", [1e30, -7.0, math.nan, math.inf])
def test_garbage_under_the_mask_changes_not_one_bit(garbage: float) -> None:
    rewards, values = torch.randn(2, 4, 9, generator=RNG)
    mask = torch.rand(4, 9, generator=RNG) > 0.4

    def results(fill: float) -> tuple[Tensor, ...]:
        filled = [torch.where(mask, x, fill) for x in (rewards, values)]
        advantages, returns = gae(*filled, mask, gamma=0.99, gae_lambda=0.95)
        return advantages, returns, whiten(torch.where(mask, advantages, fill), mask)

    for plain, other in zip(results(0.0), results(garbage), strict=True):
        assert torch.equal(plain, other)


def test_whiten_by_hand() -> None:
    # mean (1 + 2 + 6)/3 = 3, deviations -2 -1 3, variance (4 + 1 + 9)/2 = 7, rsqrt .3779645
    x, mask = torch.tensor([[1.0, 2.0], [99.0, 6.0]]), torch.tensor([[1, 1], [0, 1]])
    torch.testing.assert_close(whiten(x, mask), torch.tensor([[-0.755929, -0.377964], [0.0, 1.133893]]))


def test_whiten_of_one_action_and_of_none() -> None:
    x = torch.tensor([[3.0, 8.0]])
    assert whiten(x, torch.tensor([[1, 0]])).tolist() == [[0.0, 0.0]]
    assert whiten(x, torch.zeros(1, 2)).tolist() == [[0.0, 0.0]]


def test_value_losses_by_hand() -> None:
    # V .3, 1.0, 1.0, -1.0; V_old 0; clip .5; returns 1, 0, 2, -.4
    # .3: inside, .5 * .49 = .245;            1.0 to 0: plain 1, near .5 gives .25: .5
    # 1.0 to 2: plain 1, near 2.25: 1.125;    -1 to -.4: plain .36, near (-.5) .01: .18
    result = value_loss(
        torch.tensor([0.3, 1.0, 1.0, -1.0]), torch.zeros(4), torch.tensor([1.0, 0.0, 2.0, -0.4]), clip=0.5
    )
    torch.testing.assert_close(result.loss_A, torch.tensor([0.245, 0.5, 1.125, 0.18]))
    assert result.clipped_A.tolist() == [False, False, True, False]


def test_without_a_clip() -> None:
    result = value_loss(torch.tensor([3.0]), torch.tensor([0.0]), torch.tensor([1.0]), clip=None)
    assert result.loss_A.tolist() == [2.0]
    assert result.clipped_A.tolist() == [False]


@pytest.mark.parametrize("clip", [0.5, None])
def test_gradient_is_that_of_the_formula(clip: float | None) -> None:
    generator = torch.Generator().manual_seed(1)
    values, old, returns = torch.randn(3, 40, generator=generator, dtype=torch.float64)
    values.requires_grad_()
    value_loss(values, old, returns, clip=clip).loss_A.sum().backward()
    # V - ret, but 0 where V is out of range and the clipped error the larger one
    expected = (values - returns).detach()
    if clip is not None:
        near = torch.maximum(torch.minimum(values, old + clip), old - clip).detach()
        stuck = (near != values) & ((near - returns).abs() > (values - returns).abs())
        assert stuck.any()
        expected[stuck] = 0.0
    torch.testing.assert_close(values.grad, expected)


def test_explained_variance_by_hand() -> None:
    # returns 0 1 2: variance 1; errors ret - V = 0 .5 0: mean 1/6, squares 1/36 + 1/9 + 1/36 = 1/6, variance 1/12
    returns = torch.tensor([0.0, 1.0, 2.0])
    assert explained_variance(torch.tensor([0.0, 0.5, 2.0]), returns) == pytest.approx(11 / 12)
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(torch.full((3,), 1.0), returns) == 0.0
    assert explained_variance(-returns, returns) == pytest.approx(-3.0)  # errors 0 2 4: variance 4


def test_explained_variance_is_a_number_where_nothing_varies() -> None:
    assert explained_variance(torch.tensor([0.3, 0.7]), torch.tensor([0.1, 0.1])) == 0.0
    assert explained_variance(torch.tensor([0.3]), torch.tensor([0.1])) == 0.0
    assert explained_variance(torch.empty(0), torch.empty(0)) == 0.0
