"""GAE over tokens and turns, and the loss of the critic: by hand and by definition, with garbage under the mask."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fovea.algorithms.gae import gae, turn_ends, turn_gae, whiten
from fovea.algorithms.value_loss import explained_variance, value_loss
from gym_tests.tables import table

RNG = torch.Generator().manual_seed(0)


@table(
    ("rewards", "values", "mask", "advantages", "returns"),
    [
        # gamma .5, lambda .8, so gamma lambda = .4; rewards 0 0 1, values .2 .4 .6
        # t=2: delta = 1 + .5*0 - .6 = .4,   A = .4
        # t=1: delta = 0 + .5*.6 - .4 = -.1, A = -.1 + .4*.4 = .06
        # t=0: delta = 0 + .5*.4 - .2 = 0,   A = 0 + .4*.06 = .024
        ([0.0, 0.0, 1.0], [0.2, 0.4, 0.6], [1, 1, 1], [0.024, 0.06, 0.4], [0.224, 0.46, 1.0]),
        # actions at 0, 2 and 3; the tool's token at 1 and the padding at 4 hold anything, NaN too: A is carried over 1
        (
            *([0.0, math.nan, 0.0, 1.0, 7.0], [0.2, 9.0, 0.4, 0.6, math.nan], [1, 0, 1, 1, 0]),
            *([0.024, 0.0, 0.06, 0.4, 0.0], [0.224, 0.0, 0.46, 1.0, 0.0]),
        ),
    ],
)
def test_gae_by_hand(
    rewards: list[float], values: list[float], mask: list[int], advantages: list[float], returns: list[float]
) -> None:
    found = gae(*(torch.tensor([each]) for each in (rewards, values, mask)), gamma=0.5, gae_lambda=0.8)
    torch.testing.assert_close(found, (torch.tensor([advantages]), torch.tensor([returns])))


Floats = list[float]


def by_definition(rewards: Floats, values: Floats, gamma: float, gae_lambda: float) -> tuple[Floats, Floats]:
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
    for mask in ([[1, 0]], [[0, 0]]):
        assert whiten(torch.tensor([[3.0, 8.0]]), torch.tensor(mask)).tolist() == [[0.0, 0.0]]


def test_value_losses_by_hand() -> None:
    # V .3, 1.0, 1.0, -1.0; V_old 0; clip .5; returns 1, 0, 2, -.4
    # .3: inside, .5 * .49 = .245;            1.0 to 0: plain 1, near .5 gives .25: .5
    # 1.0 to 2: plain 1, near 2.25: 1.125;    -1 to -.4: plain .36, near (-.5) .01: .18
    returns = torch.tensor([1.0, 0.0, 2.0, -0.4])
    result = value_loss(torch.tensor([0.3, 1.0, 1.0, -1.0]), torch.zeros(4), returns, clip=0.5)
    torch.testing.assert_close(result.loss_A, torch.tensor([0.245, 0.5, 1.125, 0.18]))
    assert result.clipped_A.tolist() == [False, False, True, False]
    free = value_loss(torch.tensor([3.0]), torch.tensor([0.0]), torch.tensor([1.0]), clip=None)
    assert (free.loss_A.tolist(), free.clipped_A.tolist()) == ([2.0], [False])


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
    for values, returns in (([0.3, 0.7], [0.1, 0.1]), ([0.3], [0.1]), ([], [])):
        assert explained_variance(torch.tensor(values), torch.tensor(returns)) == 0.0


FACTORS = st.tuples(*[st.floats(0, 1)] * 4)
TURNS = st.lists(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=4), min_size=1, max_size=4)
"""Rewards and values of the tokens of each turn."""
NAMES = ("gamma", "gae_lambda", "turn_gamma", "turn_lambda")
Turns = list[list[tuple[float, float]]]


def row(turns: Turns) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards, values and mask [1, T] of an episode, with two tokens of NaN between its turns and behind them."""
    observation = [(math.nan, math.nan, False)] * 2
    tokens = [token for turn in turns for token in [*((*token, True) for token in turn), *observation]]
    table = torch.tensor(tokens, dtype=torch.float64).T[:, None]
    return table[0], table[1], table[2].bool()


def test_turn_gae_by_hand() -> None:
    """Turns of 2 tokens and 1, rewards 1 and 2 on their ends; gamma .5, lambda .5, of turns .9 and .5.

    v = .4, .6: delta_1 = 2 - .6 = 1.4 = A_1; delta_0 = 1 + .9 * .6 - .4 = 1.14, A_0 = 1.14 + .45 * 1.4 = 1.77;
    the first token: 0 + .5 * .4 - .2 + .25 * 1.77 = .4425.
    """
    rewards, values, mask = row([[(0.0, 0.2), (1.0, 0.4)], [(2.0, 0.6)]])
    advantages, returns = turn_gae(rewards, values, mask, gamma=0.5, gae_lambda=0.5, turn_gamma=0.9, turn_lambda=0.5)
    assert advantages[mask].tolist() == pytest.approx([0.4425, 1.77, 1.4])
    assert returns[mask].tolist() == pytest.approx([0.6425, 2.17, 2.0])
    assert (advantages[~mask] == 0).all()
    assert (returns[~mask] == 0).all()


def by_the_paper(turns: Turns, gamma: float, gae_lambda: float, turn_gamma: float, turn_lambda: float) -> list[float]:
    """Advantages of all tokens as sums over the deltas of turns and tokens, in Python's floats."""
    ends = [*(turn[-1] for turn in turns), (0.0, 0.0)]
    deltas = [reward + turn_gamma * after - value for (reward, value), (_, after) in pairwise(ends)]
    found: list[float] = []
    for place, turn in enumerate(turns):
        of_turn = math.fsum((turn_gamma * turn_lambda) ** k * delta for k, delta in enumerate(deltas[place:]))
        inner = [reward + gamma * after - value for (reward, value), (_, after) in pairwise(turn)]
        for token in range(len(turn)):
            decays = [(gamma * gae_lambda) ** k for k in range(len(turn) - token)]
            terms = [*inner[token:], of_turn]
            found.append(math.fsum(decay * term for decay, term in zip(decays, terms, strict=True)))
    return found


@settings(max_examples=80, deadline=None)
@given(TURNS, FACTORS)
def test_equals_the_sums_of_the_paper(turns: Turns, factors: tuple[float, float, float, float]) -> None:
    rewards, values, mask = row(turns)
    advantages, returns = turn_gae(rewards, values, mask, **dict(zip(NAMES, factors, strict=True)))
    expected = by_the_paper(turns, *factors)
    assert advantages[mask].tolist() == pytest.approx(expected, abs=1e-9)
    assert returns[mask].tolist() == pytest.approx((torch.tensor(expected) + values[mask]).tolist(), abs=1e-6)


def test_an_episode_does_not_depend_on_its_neighbours() -> None:
    """Rows of another number of turns and another length, padded to it."""
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 3, 12, generator=generator)
    mask = torch.rand(3, 12, generator=generator) > 0.4
    factors = {"gamma": 0.9, "gae_lambda": 0.8, "turn_gamma": 0.7, "turn_lambda": 0.6}
    together = turn_gae(rewards, values, mask, **factors)
    for place in range(3):
        alone = turn_gae(*(x[place : place + 1, :] for x in (rewards, values, mask)), **factors)
        for one, all_ in zip(alone, together, strict=True):
            assert torch.equal(one[0], all_[place])


def test_ends_of_turns() -> None:
    mask = torch.tensor([[1, 1, 0, 1, 0, 0], [1, 0, 1, 1, 0, 1]])
    assert turn_ends(mask).int().tolist() == [[0, 1, 0, 1, 0, 0], [1, 0, 0, 1, 0, 1]]
