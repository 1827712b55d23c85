"""GAE over the turns of an episode, and within them over tokens: by hand, by the paper's formulas, in its limits."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fovea.algorithms.gae import gae, turn_ends, turn_gae

FACTORS = st.tuples(*[st.floats(0, 1)] * 4)
NUMBERS = st.floats(-2, 2)
TURNS = st.lists(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=4), min_size=1, max_size=4)
"""Rewards and values of the tokens of each turn."""


def row(turns: list[list[tuple[float, float]]]) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards, values and mask [1, T] of an episode, with two tokens of NaN between its turns and behind them."""
    observation = [(math.nan, math.nan, False)] * 2
    tokens = [token for turn in turns for token in [*((*token, True) for token in turn), *observation]]
    table = torch.tensor(tokens, dtype=torch.float64).T[:, None]
    return table[0], table[1], table[2].bool()


def test_numbers_by_hand() -> None:
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


def by_the_paper(
    turns: list[list[tuple[float, float]]], gamma: float, gae_lambda: float, turn_gamma: float, turn_lambda: float
) -> list[float]:
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
def test_equals_the_sums_of_the_paper(
    turns: list[list[tuple[float, float]]], factors: tuple[float, float, float, float]
) -> None:
    gamma, gae_lambda, turn_gamma, turn_lambda = factors
    rewards, values, mask = row(turns)
    advantages, returns = turn_gae(
        rewards, values, mask, gamma=gamma, gae_lambda=gae_lambda, turn_gamma=turn_gamma, turn_lambda=turn_lambda
    )
    expected = by_the_paper(turns, *factors)
    assert advantages[mask].tolist() == pytest.approx(expected, abs=1e-9)
    assert returns[mask].tolist() == pytest.approx((torch.tensor(expected) + values[mask]).tolist(), abs=1e-6)


@settings(max_examples=30, deadline=None)
@given(TURNS, FACTORS)
def test_one_turn_is_gae_over_tokens_whatever_holds_between_turns(
    turns: list[list[tuple[float, float]]], factors: tuple[float, float, float, float]
) -> None:
    gamma, gae_lambda, turn_gamma, turn_lambda = factors
    rewards, values, mask = row(turns[:1])
    within = {"gamma": gamma, "gae_lambda": gae_lambda}
    found = turn_gae(rewards, values, mask, turn_gamma=turn_gamma, turn_lambda=turn_lambda, **within)
    for ours, plain in zip(found, gae(rewards, values, mask, gamma=gamma, gae_lambda=gae_lambda), strict=True):
        torch.testing.assert_close(ours, plain, atol=1e-12, rtol=0)


@settings(max_examples=30, deadline=None)
@given(TURNS)
def test_factors_of_one_give_reward_to_go_of_turns_minus_value(turns: list[list[tuple[float, float]]]) -> None:
    """As GAE over tokens does, where all rewards are on the ends of turns."""
    on_ends = [[*((0.0, value) for _, value in turn[:-1]), turn[-1]] for turn in turns]
    rewards, values, mask = row(on_ends)
    found = turn_gae(rewards, values, mask, gamma=1, gae_lambda=1, turn_gamma=1, turn_lambda=1)
    for ours, plain in zip(found, gae(rewards, values, mask, gamma=1, gae_lambda=1), strict=True):
        torch.testing.assert_close(ours, plain, atol=1e-9, rtol=0)


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
