"""From rewards to advantages of every action, with numbers by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from fovea.advantages import with_advantages
from fovea.config.algorithm import Algorithm
from fovea.types import Batch, Sample, SampleGroup
from tests.records import PROMPT, floats, sample_of


def sample(reward: float, tokens: int = 2, **fields: object) -> Sample:
    return sample_of(range(tokens), rollout_logprobs_T=floats(*[-1.0] * tokens), reward=reward, **fields)


def batch(*groups: tuple[Sample, ...]) -> Batch:
    return Batch(groups=tuple(SampleGroup(prompt=PROMPT, samples=samples) for samples in groups))


def advantages(of: Batch, coefficient: float = 0.0, **settings: object) -> list[list[float]]:
    result, _ = with_advantages(of, Algorithm.model_validate(settings), coefficient)
    return [[float(x) for x in s.advantages_T] for s in result.samples]  # type: ignore[union-attr]


TWO_GROUPS = batch((sample(1.0), sample(0.0, 3)), (sample(0.5), sample(0.5)))


def test_of_groups_every_token_has_the_same() -> None:
    """dr_grpo: 1 - 0.5 and 0 - 0.5; the second group has no signal."""
    assert advantages(TWO_GROUPS, name="dr_grpo") == [[0.5, 0.5], [-0.5, -0.5, -0.5], [0, 0], [0, 0]]


SMALLER = batch((sample(1.0), sample(0.0), sample(0.5)), (sample(1.0), sample(0.0, 3)))
"""A group of three, and one of which a session has failed."""


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_a_group_of_which_a_session_failed_is_compared_with_itself(name: str) -> None:
    alone = [advantages(Batch(groups=(group,)), advantage=name) for group in SMALLER.groups]
    assert advantages(SMALLER, advantage=name) == [values for each in alone for values in each]


def test_a_smaller_group_in_a_whole_step_less_the_groups_mean() -> None:
    """Two tokens each of .5, -.5, 0 and .5, three of -.5: mean -.5/11, squares 9/4 - 1/44 = 98/44, over 10."""
    mean, by = -0.5 / 11, 1 / math.sqrt(98 / 44 / 10)
    expected = [(value - mean) * by for value in (0.5, -0.5, 0.0, 0.5, -0.5)]
    found = advantages(SMALLER, advantage="reinforce++_baseline")
    assert [values[0] for values in found] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("advantage", "equal_group"), [("reinforce++", 2), ("reinforce++_baseline", 3)])
def test_of_the_whole_step(advantage: str, equal_group: int) -> None:
    """Two tokens of 1, three of 0 and four of 0.5: mean 4/9, squares 2 (5/9)^2 + 3 (4/9)^2 + 4 (1/18)^2 = 99/81,
    over 8. The second group is compared with the first.

    Less the group's mean: two tokens of 0.5, three of -0.5 and four of 0, mean -1/18, and the same squares: a reward of
    0.5 twice is the mean of its group, and no longer that of the step."""
    by = 1 / math.sqrt(99 / 81 / 8)
    found = advantages(TWO_GROUPS, advantage=advantage)
    assert found[0] == pytest.approx([5 / 9 * by] * 2, rel=1e-5)
    assert found[1] == pytest.approx([-4 / 9 * by] * 3, rel=1e-5)
    assert found[equal_group] == pytest.approx([1 / 18 * by] * 2, rel=1e-5)


def test_of_the_whole_step_a_kl_counts_for_what_comes_before_it() -> None:
    """Hu et al.: A_t = R - beta * sum of the KL from t on. Returns 0.9 1.0 and 0 0: mean 0.475, squares .425^2 +
    .525^2 + 2 * .475^2 = 0.9075, over 3 = 0.3025 = 0.55^2."""
    first = sample(1.0, old_logprobs_T=floats(-1, -1), reference_logprobs_T=floats(-2, -1))
    second = sample(0.0, old_logprobs_T=floats(-1, -1), reference_logprobs_T=floats(-1, -1))
    settings = {"advantage": "reinforce++", "kl": {"name": "reward", "coef": 0.1}}
    assert advantages(batch((first, second)), 0.1, **settings) == [
        pytest.approx([0.425 / 0.55, 0.525 / 0.55], rel=1e-5),
        pytest.approx([-0.475 / 0.55, -0.475 / 0.55], rel=1e-5),
    ]


def test_a_kl_in_the_reward_is_taken_off_in_sum() -> None:
    """k1 of the first: (-1 + 2) + (-1 + 3) = 3, of the second 0. Rewards 1 - 0.1 * 3 = 0.7 and 0.5, mean 0.6."""
    first = sample(1.0, old_logprobs_T=floats(-1, -1), reference_logprobs_T=floats(-2, -3))
    second = sample(0.5, old_logprobs_T=floats(-1, -1), reference_logprobs_T=floats(-1, -1))
    settings = {"advantage": "dr_grpo", "kl": {"name": "reward", "estimator": "k1", "coef": 0.1}}
    assert advantages(batch((first, second)), 0.1, **settings) == [
        pytest.approx([0.1, 0.1], abs=1e-6),
        pytest.approx([-0.1, -0.1], abs=1e-6),
    ]
    _, metrics = with_advantages(batch((first, second)), Algorithm.model_validate(settings), 0.1)
    assert metrics["kl/reward"] == pytest.approx(3 / 4)
    assert metrics["reward_kl"] == pytest.approx(0.3 / 2)
    assert metrics["kl/coef"] == 0.1


PPO = {"advantage": {"name": "gae", "gamma": 0.5, "gae_lambda": 0.5}}


def test_gae_of_a_completion_by_hand_whitened_over_the_step() -> None:
    """Rewards 0, 1; values 0.2, 0.4: delta 1 = 1 - 0.4 = 0.6, delta 0 = 0.5 * 0.4 - 0.2 = 0, A = (0.15, 0.6).
    The other: reward 0, value 0.5, A = -0.5. Mean 1/12, unbiased variance 0.306..; returns are A + V before that."""
    first, second = sample(1.0, values_T=floats(0.2, 0.4)), sample(0.0, 1, values_T=floats(0.5))
    result, metrics = with_advantages(batch((first,), (second,)), Algorithm.model_validate(PPO), 0.0)
    raw = np.array([0.15, 0.6, -0.5])
    expected = (raw - raw.mean()) / raw.std(ddof=1)
    one, other = result.samples
    np.testing.assert_allclose(one.advantages_T, expected[:2], atol=1e-5)  # type: ignore[arg-type]
    np.testing.assert_allclose(other.advantages_T, expected[2:], atol=1e-5)  # type: ignore[arg-type]
    np.testing.assert_allclose(one.returns_T, [0.35, 1.0], atol=1e-6)  # type: ignore[arg-type]
    np.testing.assert_allclose(other.returns_T, [0.0], atol=1e-6)  # type: ignore[arg-type]
    assert metrics["value/mean"] == pytest.approx(1.1 / 3)
    assert metrics["return/mean"] == pytest.approx(1.35 / 3)


def test_a_kl_in_the_reward_falls_where_it_arises() -> None:
    """With gamma = lambda = 1 and values 0 a token's return is what is still to come: -0.1 off at token 0 only."""
    one = sample(1.0, values_T=floats(0, 0), old_logprobs_T=floats(-1, -1), reference_logprobs_T=floats(-2, -1))
    settings = Algorithm.model_validate({"advantage": "gae", "kl": {"name": "reward", "estimator": "k1", "coef": 0.1}})
    result, _ = with_advantages(batch((one,)), settings, 0.1)
    np.testing.assert_allclose(result.samples[0].returns_T, [0.9, 1.0], atol=1e-6)  # type: ignore[arg-type]


def test_neighbours_and_order_change_no_return() -> None:
    alone = sample(1.0, values_T=floats(0.2, 0.4))
    long = sample(0.3, 5, values_T=floats(1, 2, 3, 4, 5))
    settings = Algorithm.model_validate(PPO)
    for of in (batch((alone,), (long,)), batch((long,), (alone,)), batch((long, alone))):
        result, _ = with_advantages(of, settings, 0.0)
        (found,) = [s for s in result.samples if len(s.token_ids_T) == 2]
        np.testing.assert_allclose(found.returns_T, [0.35, 1.0], atol=1e-6)  # type: ignore[arg-type]


def test_statistics_are_over_actions() -> None:
    _, metrics = with_advantages(TWO_GROUPS, Algorithm(name="dr_grpo"), 0.0)
    values = np.array([0.5, 0.5, -0.5, -0.5, -0.5, 0, 0, 0, 0])
    assert metrics["advantage/mean"] == pytest.approx(values.mean(), abs=1e-6)
    assert metrics["advantage/std"] == pytest.approx(values.std(), abs=1e-6)
    assert metrics["advantage/max_abs"] == 0.5


def test_an_empty_step_has_none() -> None:
    assert with_advantages(Batch(groups=()), Algorithm(), 0.0) == (Batch(groups=()), {})


def two_turns(*turn_rewards: float, **fields: object) -> Sample:
    """An episode of turns of 2 tokens and 1, with 2 tokens of an observation between them."""
    mask = np.array([True, True, False, False, True])
    return sample_of(range(5), **{"mask_T": mask, "turn_rewards": turn_rewards, "reward": sum(turn_rewards)} | fields)


def test_rewards_by_turn_give_every_turn_its_return() -> None:
    """reinforce++: rewards 1 and 2 with a discount of .5: returns 1 + .5 * 2 = 2 in the first turn, 2 in the second;
    -1 and 0 in the other episode: -1, -1 and 0. Mean .5 of six, squares 4 * 1.5^2 ... over 5."""
    returns = np.array([2, 2, 2, -1, -1, 0])
    expected = (returns - returns.mean()) / returns.std(ddof=1)
    found = advantages(batch((two_turns(1, 2), two_turns(-1, 0))), advantage="reinforce++", turn_discount=0.5, kl=None)
    assert found[0] == pytest.approx([*expected[:2], 0, 0, expected[2]], abs=1e-5)
    assert found[1] == pytest.approx([*expected[3:5], 0, 0, expected[5]], abs=1e-5)


def test_returns_are_those_of_a_plain_loop_over_tokens() -> None:
    """With a KL penalty on every token: the return of a token is its reward plus that of the next action, discounted
    where a turn ends."""
    rng = np.random.default_rng(0)
    logprobs = {name: rng.normal(size=5).astype(np.float32) for name in ("old_logprobs_T", "reference_logprobs_T")}
    group = (two_turns(0.3, 0.7, **logprobs), two_turns(0, 0, **logprobs))
    kl = {"name": "reward", "estimator": "k1", "coef": 0.1}
    found = advantages(batch(group), 0.1, advantage="reinforce++", turn_discount=0.8, kl=kl)
    penalty = 0.1 * (logprobs["old_logprobs_T"] - logprobs["reference_logprobs_T"])
    all_returns: list[float] = []
    for rewards in ((0, 0.3, 0.7), (0, 0, 0)):
        first, second, last = (reward - penalty[place] for reward, place in zip(rewards, (0, 1, 4), strict=True))
        all_returns += [first + second + 0.8 * last, second + 0.8 * last, last]
    expected = (np.array(all_returns) - np.mean(all_returns)) / np.std(all_returns, ddof=1)
    assert [each[place] for each in found for place in (0, 1, 4)] == pytest.approx(expected.tolist(), abs=1e-4)


def test_gae_over_turns_by_hand() -> None:
    """As in tests/algorithms/test_gae.py: returns of .6425, 2.17 and 2; the discount is the algorithm's."""
    values = floats(0.2, 0.4, 9, 9, 0.6)
    gae = {"name": "gae", "gamma": 0.5, "gae_lambda": 0.5, "turn_lambda": 0.5}
    settings = Algorithm.model_validate({"advantage": gae, "turn_discount": 0.9})
    result, _ = with_advantages(batch((two_turns(1, 2, values_T=values),)), settings, 0.0)
    np.testing.assert_allclose(result.samples[0].returns_T, [0.6425, 2.17, 0, 0, 2], atol=1e-6)  # type: ignore[arg-type]
    raw = np.array([0.4425, 1.77, 1.4])
    white = (raw - raw.mean()) / raw.std(ddof=1)
    found = result.samples[0].advantages_T
    np.testing.assert_allclose(found, [*white[:2], 0, 0, white[2]], atol=1e-5)  # type: ignore[arg-type]


@pytest.mark.parametrize("advantage", ["reinforce++", {"name": "gae", "gamma": 0.9, "gae_lambda": 0.8}])
def test_all_of_the_reward_in_the_last_turn_is_a_reward_of_the_episode(advantage: object) -> None:
    """Bit for bit."""
    values = floats(0.2, 0.4, 9, 9, 0.6)
    by_turn = [two_turns(0, reward, values_T=values) for reward in (0.3, 0.7)]
    whole = [replace(each, turn_rewards=()) for each in by_turn]
    found = [advantages(batch(tuple(each)), advantage=advantage, kl=None) for each in (by_turn, whole)]
    assert found[0] == found[1]


def test_values_are_needed() -> None:
    with pytest.raises(AssertionError, match="GAE needs the values"):
        with_advantages(batch((replace(sample(1.0)),)), Algorithm(name="ppo"), 0.0)
