"""Group estimators by hand and as verl states them, the overlong penalty, and weights of completions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fovea.algorithms.advantage import (
    dr_grpo,
    grpo,
    has_signal,
    overlong_penalty,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    rloo,
)
from fovea.algorithms.aggregation import Aggregation, sample_weights
from fovea.algorithms.ratio import sequence_means, sequence_sums, spread
from gym_tests.tables import table


def whole_step(returns: torch.Tensor) -> torch.Tensor:
    """reinforce++ where every place is an action."""
    return reinforce_plus_plus(returns, torch.ones_like(returns, dtype=torch.bool))


def one_token_each(rewards: torch.Tensor) -> torch.Tensor:
    """reinforce++_baseline where every completion weighs the same."""
    return reinforce_plus_plus_baseline(rewards, torch.ones_like(rewards, dtype=torch.long))


ESTIMATORS = [grpo, dr_grpo, rloo, whole_step, one_token_each]
REWARDS = torch.tensor([[0.0, 1.0, 0.5], [1.0, 1.0, 0.0]])


@table(
    ("advantages", "expected"),
    [
        # row 0: mean 0.5, deviations -.5 .5 0, variance (.25 + .25) / 2 = .25, std .5
        # row 1: mean 2/3, deviations 1/3 1/3 -2/3, variance (1/9 + 1/9 + 4/9) / 2 = 1/3, std .5773503
        (grpo(REWARDS), [[-1.0, 1.0, 0.0], [0.577350, 0.577350, -1.154701]]),
        (dr_grpo(REWARDS), [[-0.5, 0.5, 0.0], [1 / 3, 1 / 3, -2 / 3]]),
        # row 0: 0 - (1 + .5)/2, 1 - (0 + .5)/2, .5 - (0 + 1)/2; row 1: 1 - (1 + 0)/2 twice, 0 - (1 + 1)/2
        (rloo(REWARDS), [[-0.75, 0.75, 0.0], [0.5, 0.5, -1.0]]),
        # mean 3.5/6 = 7/12; deviations in twelfths -7 5 -1 5 5 -7, squares 49+25+1+25+25+49 = 174; variance
        # 174/144/5 = .2416667, std .4915960; -7/12 / std = -1.186611, 5/12 / std = .847579, -1/12 / std = -.169516
        (whole_step(REWARDS), [[-1.186611, 0.847579, -0.169516], [0.847579, 0.847579, -1.186611]]),
        # it counts actions and passes over the rest: returns 1 1 and 0, as the second row above
        (
            reinforce_plus_plus(
                torch.tensor([[1.0, 1.0], [0.0, torch.nan]]), torch.tensor([[True, True], [True, False]])
            ),
            [[0.577350, 0.577350], [-1.154701, 0.0]],
        ),
        # it compares across groups: mean .5, deviations +-.4, variance 4 * .16 / 3, std .4618802
        (whole_step(torch.tensor([[0.1, 0.1], [0.9, 0.9]])), [[-0.866024] * 2, [0.866024] * 2]),
        # groups of 1: mean .625, deviations -+.375, variance 2 * .140625, std .5303301
        (whole_step(torch.tensor([[0.25], [1.0]])), [[-0.707106], [0.707106]]),
    ],
)
def test_advantages_by_hand(advantages: torch.Tensor, expected: list[list[float]]) -> None:
    torch.testing.assert_close(advantages, torch.tensor(expected), atol=1e-5, rtol=0)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_is_never_an_advantage_of_zero(estimator, bad: float) -> None:  # type: ignore[no-untyped-def]
    assert not estimator(torch.tensor([[0.0, bad], [0.0, 1.0]]))[0].isfinite().all()


@pytest.mark.parametrize("estimator", ESTIMATORS)
@settings(max_examples=50, deadline=None)
@given(st.floats(-10, 10, width=32), st.integers(1, 4), st.integers(2, 16))
def test_equal_rewards_give_exactly_zero(estimator, reward: float, groups: int, n: int) -> None:  # type: ignore[no-untyped-def]
    assert estimator(torch.full((groups, n), reward)).tolist() == [[0.0] * n] * groups


@pytest.mark.parametrize("estimator", [grpo, dr_grpo, rloo])
def test_an_equal_group_is_zero_beside_one_with_signal(estimator) -> None:  # type: ignore[no-untyped-def]
    advantages = estimator(torch.tensor([[0.1] * 5, [0.1, 0.9, 0.1, 0.9, 0.9]]))
    assert advantages[0].tolist() == [0.0] * 5
    assert (advantages[1] != 0).all()


def test_groups_of_one() -> None:
    rewards = torch.tensor([[0.25], [1.0]])
    assert grpo(rewards).tolist() == dr_grpo(rewards).tolist() == [[0.25], [1.0]]
    with pytest.raises(ValueError, match="groups of 1"):
        rloo(rewards)
    with pytest.raises(ValueError, match="groups of 1 have no others: use 2 or more"):
        one_token_each(rewards)
    assert whole_step(torch.tensor([[0.7]])).tolist() == [[0.0]]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.1, 0.9, 1.0]), min_size=2, max_size=12))
def test_rloo_is_dr_grpo_times_n_over_n_minus_one(rewards: list[float]) -> None:
    group, n = torch.tensor([rewards]), len(rewards)
    torch.testing.assert_close(rloo(group), dr_grpo(group) * n / (n - 1), atol=1e-5, rtol=1e-5)


def verl_baseline(token_rewards: torch.Tensor, mask: torch.Tensor, groups: list[int]) -> torch.Tensor:
    """reinforce_plus_plus_baseline as verl's core_algos state it: group mean, one value per token, masked whitening."""
    scores = token_rewards.sum(-1)
    means = {group: scores[[g == group for g in groups]].mean() for group in groups}
    rows = torch.stack([score - means[group] for score, group in zip(scores, groups, strict=True)])
    values = rows[:, None].tile(1, mask.shape[1]) * mask
    mean = (values * mask).sum() / mask.sum()
    variance = ((values - mean).square() * mask).sum() / mask.sum()
    variance = variance * mask.sum() / (mask.sum() - 1)
    return (values - mean) * torch.rsqrt(variance + 1e-8) * mask


def test_reinforce_plus_plus_baseline_is_verls() -> None:
    rewards = torch.tensor([[0.1, 1.0, 0.5], [1.0, 1.0, 0.0], [0.9, 0.9, 0.9]])
    lengths = torch.tensor([[3, 7, 1], [2, 2, 9], [4, 5, 6]])
    mask = (torch.arange(9)[None] < lengths.flatten()[:, None]).float()
    token_rewards = torch.zeros_like(mask)
    token_rewards[torch.arange(9), lengths.flatten() - 1] = rewards.flatten()
    theirs = verl_baseline(token_rewards, mask, [0, 0, 0, 1, 1, 1, 2, 2, 2])
    ours = reinforce_plus_plus_baseline(rewards, lengths)
    torch.testing.assert_close(ours.flatten()[:, None] * mask, theirs, atol=1e-6, rtol=1e-5)
    assert (ours[2] != 0).all(), "a silent group has its part in the mean of the step"


@pytest.mark.parametrize("scale", [1e-20, 1e-7, 1.0, 1e6, 1e30])
def test_equal_rewards_are_equal_at_any_scale(scale: float) -> None:
    """A few float32 roundings of 1e6 are more than 1e-6, and rewards of 1e-7 may differ by all they are."""
    equal = torch.tensor([[0.1, 0.1 + 1e-8, 0.1]]) * scale
    differ = torch.tensor([[0.1, 0.1001, 0.1]]) * scale
    rounded = equal * (1 + 2e-7 * torch.tensor([[0.0, 1.0, -1.0]]))
    assert [bool(has_signal(x)) for x in (equal, rounded, differ)] == [False, False, True]
    assert (grpo(rounded) == 0).all()
    assert not has_signal(torch.zeros(1, 3))
    assert has_signal(torch.tensor([[float("inf"), 1.0, 2.0]]))


@given(st.lists(st.sampled_from([0.0, 0.1, 0.9, 1.0]), min_size=2, max_size=12))
def test_a_group_adds_up_to_zero_and_does_not_feel_its_neighbours(rewards: list[float]) -> None:
    alone = grpo(torch.tensor([rewards]))
    assert abs(float(alone.sum())) < 1e-4
    beside = grpo(torch.tensor([rewards, [1.0] * len(rewards)]))
    torch.testing.assert_close(beside[:1], alone)


@pytest.mark.parametrize("scale", [0.5, 3.0])
def test_normalised_advantages_do_not_depend_on_the_scale_of_rewards(scale: float) -> None:
    rewards = torch.tensor([[0.0, 0.5, 1.0, 1.0]])
    first, second = (grpo(r) for r in (rewards, rewards * scale))
    torch.testing.assert_close(first, second, atol=1e-4, rtol=0)


# 100 - 20 is where the buffer begins; 5 of 20, times a half; at the limit the whole factor
@table(("length", "expected"), [(0, 0.0), (80, 0.0), (85, -0.125), (100, -0.5)])
def test_overlong_penalty_by_hand(length: int, expected: float) -> None:
    assert overlong_penalty(length, max_tokens=100, buffer_tokens=20, factor=0.5) == pytest.approx(expected)


MODES: list[Aggregation] = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", [1 / 4, 1 / 4, 1 / 4]),  # 1 + 0 + 3 actions
        ("seq-mean-token-mean", [1 / 3, 1 / 3, 1 / 9]),  # 3 rows; the second has nothing to weigh
        ("seq-mean-token-sum", [1 / 3, 1 / 3, 1 / 3]),
        ("seq-mean-token-sum-norm", [1 / 30, 1 / 30, 1 / 30]),  # 3 rows of at most 10
    ],
)
def test_weights_by_hand(mode: Aggregation, expected: list[float]) -> None:
    assert sample_weights(mode, [1, 0, 3], max_response_tokens=10).tolist() == pytest.approx(expected)


def padded(mode: Aggregation, losses_BT: np.ndarray, mask_BT: np.ndarray, longest: int) -> float:
    """The four aggregations as they are written over a padded batch."""
    sums_B, counts_B = (losses_BT * mask_BT).sum(1), mask_BT.sum(1)
    if mode == "token-mean":
        return float(sums_B.sum() / max(counts_B.sum(), 1))
    if mode == "seq-mean-token-mean":
        return float(np.mean([s / n if n else 0.0 for s, n in zip(sums_B, counts_B, strict=True)]))
    if mode == "seq-mean-token-sum":
        return float(sums_B.mean())
    return float(sums_B.sum() / (len(sums_B) * longest))


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=8), cut=st.integers(0, 8), seed=st.integers(0, 99))
def test_weighted_sums_equal_the_padded_batch_for_any_split(
    mode: Aggregation, lengths: list[int], cut: int, seed: int
) -> None:
    losses = np.random.default_rng(seed).normal(size=(len(lengths), 12))
    mask = np.arange(12)[None] < np.array(lengths)[:, None]
    weights = sample_weights(mode, lengths, max_response_tokens=12)
    sums = [float(row[:n].sum()) for row, n in zip(losses, lengths, strict=True)]
    products = [w * s for w, s in zip(weights.tolist(), sums, strict=True)]
    assert sum(products[:cut]) + sum(products[cut:]) == pytest.approx(padded(mode, losses, mask, 12), abs=1e-12)


def test_no_completions_and_no_actions_are_not_an_error() -> None:
    for mode in MODES:
        assert sample_weights(mode, [], max_response_tokens=4).tolist() == []
        assert np.isfinite(sample_weights(mode, [0, 0], max_response_tokens=4)).all()


def test_sums_means_and_spread_by_hand() -> None:
    x, lengths = torch.tensor([1.0, 2.0, 3.0, 10.0]), [3, 0, 1]
    assert sequence_sums(x, lengths).tolist() == [6.0, 0.0, 10.0]
    assert sequence_means(x, lengths).tolist() == [2.0, 0.0, 10.0]
    assert spread(torch.tensor([7.0, 8.0, 9.0]), lengths).tolist() == [7.0, 7.0, 7.0, 9.0]
    assert sequence_sums(x[:0], []).tolist() == sequence_means(x[:0], []).tolist() == spread(x[:0], []).tolist() == []


def test_sequence_helpers_have_gradients() -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 10.0], requires_grad=True)
    weights = torch.tensor([6.0, 5.0, 4.0])
    (sequence_means(x, [3, 0, 1]) * weights).sum().backward()
    assert x.grad.tolist() == [2.0, 2.0, 2.0, 4.0]
    s = torch.tensor([7.0, 8.0, 9.0], requires_grad=True)
    spread(s, [3, 0, 1]).sum().backward()
    assert s.grad.tolist() == [3.0, 0.0, 1.0]


def test_lengths_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(RuntimeError):
        sequence_sums(torch.zeros(4), [3])
