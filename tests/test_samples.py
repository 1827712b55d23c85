"""From groups to a batch: which train, weights, penalties of length; and from rewards to advantages of every action."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from fovea.advantages import with_advantages
from fovea.config.algorithm import Algorithm
from fovea.metrics.names import definition_of
from fovea.samples import episode_metrics, make_batch
from fovea.types import Batch, Episode, EpisodeEnd, Group, Metrics, Sample, SampleGroup
from fovea_gym.types import Score, Task
from gym_tests.tables import table
from tests.records import PROMPT, completion_of, floats, one_turn, sample_of

MAX_NEW_TOKENS = 10


def group(*rewards: float, tokens: int = 4, kind: str = "all") -> Group:
    return Group(prompt=PROMPT, episodes=tuple(episode(reward, tokens, kind) for reward in rewards))


def episode(reward: float, tokens: int, kind: str) -> Episode:
    completion = completion_of(range(tokens), text="x", finish="length" if tokens == MAX_NEW_TOKENS else "stop")
    task = Task(id="0", question="q", answer="a", kind=kind)
    score = Score(reward=reward, accuracy=float(reward == 1), parts={"answer": reward})
    return one_turn(task, completion, score)


GROUPS = [group(1, 1), group(0, 1), group(0.5, 0.5, tokens=6), group(0, 0), group(1, 0)]


def make(groups: list[Group], **settings: object) -> tuple[Batch, Metrics]:
    return make_batch(groups, Algorithm.model_validate(settings), max_new_tokens=MAX_NEW_TOKENS)


def test_groups_with_signal_train_and_the_worst_without() -> None:
    for limit, first_rewards in ((0, [0, 1]), (1, [0, 0, 1])):
        batch, _ = make(GROUPS, max_groups_without_signal=limit)
        assert [g.samples[0].reward for g in batch.groups] == first_rewards
    kept, _ = make(GROUPS, max_groups_without_signal=2)
    lengths = [len(g.samples[0].token_ids_T) for g in kept.groups]
    assert lengths == [4, 6, 4, 4], "all wrong before half right, in the order of the step"
    assert len(make(GROUPS, max_groups_without_signal=9)[0].groups) == 5


@table("limit", [0, 1, 9])
def test_the_loss_is_divided_by_the_tokens_of_every_group(limit: int) -> None:
    batch, counts = make(GROUPS, max_groups_without_signal=limit)
    assert {sample.weight for sample in batch.samples} == {1 / (8 * 4 + 2 * 6)}
    assert (counts["groups/with_signal"], counts["groups/without_signal"]) == (2, 3)
    assert counts["groups/skipped"] == 5 - len(batch.groups)


def test_metrics_are_means_over_episodes_and_by_kind() -> None:
    metrics = episode_metrics([group(0, 1, kind="a"), group(0.5, 0.5, tokens=10, kind="b")])
    expected = {"reward": 0.5, "accuracy": 0.25, "accuracy/train/a": 0.5, "accuracy/train/b": 0.0, "reward/answer": 0.5}
    expected |= {"response_tokens_mean": 7, "response_tokens_max": 10, "truncated_frac": 0.5}
    assert {name: metrics[name] for name in expected} == expected
    assert [name for name in metrics if name.startswith("turns/")] == [], "every episode has one turn"


def test_parts_of_images_are_means_by_position_and_kind() -> None:
    def with_images(kind: str, *image_parts: dict[str, float]) -> Group:
        one = episode(1, 4, kind)
        return replace(group(1), episodes=(replace(one, score=replace(one.score, image_parts=image_parts)),))

    groups = [with_images("a", {"seen": 1.0}, {"seen": 0.5}), with_images("b", {"seen": 0.0}), with_images("b")]
    metrics = episode_metrics(groups)
    by_image = {key: value for key, value in metrics.items() if "/image_" in key}
    seen = {"1/seen": 0.5, "2/seen": 0.5, "1/seen/a": 1.0, "2/seen/a": 0.5, "1/seen/b": 0.0}
    assert by_image == {f"reward/image_{name}": value for name, value in seen.items()}
    one_kind = episode_metrics(groups[:1])
    assert {key for key in one_kind if "/image_" in key} == {"reward/image_1/seen", "reward/image_2/seen"}
    assert all("<position>" in definition_of(key).name for key in by_image)  # type: ignore[union-attr]


def test_what_does_not_train_is_handed_on_for_the_comparison_with_the_engine() -> None:
    batch, _ = make(GROUPS, max_groups_without_signal=1)
    assert [[s.reward for s in g.samples] for g in batch.left_out] == [[1, 1], [0.5, 0.5]]
    assert len(batch.groups) + len(batch.left_out) == len(GROUPS)
    assert not make(GROUPS, kl={"coef": 0.1})[0].left_out


def test_the_share_without_signal_is_of_all_that_was_drawn_and_needs_two_answers() -> None:
    assert episode_metrics(GROUPS)["groups/without_signal_frac"] == 3 / 5
    single = [group(1), group(0)]
    assert "groups/without_signal_frac" not in episode_metrics(single)
    assert make_batch(single, Algorithm(), max_new_tokens=10)[1] == {}, "one answer differs from nothing"


def test_a_group_of_which_sessions_failed_is_one_of_the_step() -> None:
    """The first group has shrunk to one episode, and the second to two."""
    smaller = [group(1), group(0, 1), group(0, 0, 0, 1), group(1, 1, 1, 1)]
    batch, counts = make_batch(smaller, Algorithm(max_groups_without_signal=0), max_new_tokens=10)
    assert [len(each.samples) for each in batch.groups] == [2, 4]
    assert counts == {"groups/with_signal": 2, "groups/without_signal": 2, "groups/skipped": 2}
    assert episode_metrics(smaller)["groups/without_signal_frac"] == 1 / 2


def in_turns(*rewards: float, penalised_tokens: int = 2, end: EpisodeEnd = "done") -> Episode:
    """An episode with a turn for each reward; every turn but the first answers an observation of 3 tokens."""
    one = episode(sum(rewards), penalised_tokens, "all")
    more = replace(one.turns[0].tokens, observation=PROMPT)  # type: ignore[type-var]
    turns = [one.turns[0], *(replace(one.turns[0], tokens=more) for _ in rewards[1:])]
    return replace(one, turns=tuple(turns), score=replace(one.score, turns=rewards), end=end)


def samples_of(*episodes: Episode, **settings: object) -> tuple[tuple[Sample, ...], Metrics]:
    batch, counts = make([Group(prompt=PROMPT, episodes=episodes)], **settings)
    return batch.samples, counts


def test_rewards_by_turn_are_summed_and_discounted() -> None:
    """1 + .5 * 2 + .25 * 4 = 3, and 1 + .5 * 1 = 1.5; the samples keep the rewards of their turns."""
    (first, second), _ = samples_of(in_turns(1, 2, 4), in_turns(1, 1), turn_discount=0.5)
    assert (first.reward, second.reward) == (3, 1.5)
    assert (first.turn_rewards, second.turn_rewards) == ((1, 2, 4), (1, 1))
    assert first.turn_ends.tolist() == [1, 6, 11]
    (first, second), _ = samples_of(in_turns(1, 2, 4), in_turns(1, 1))
    assert (first.reward, second.reward) == (7, 2)
    # a discount leaves the reward of a whole episode
    whole = replace(in_turns(1, 2), score=Score(reward=3, accuracy=0))
    (first, _), _ = samples_of(whole, in_turns(0, 0), turn_discount=0.5)
    assert (first.reward, first.turn_rewards) == (3, ())


def test_a_penalty_of_length_is_part_of_the_last_turns_reward() -> None:
    """9 of 10 tokens, of which the last 5 are penalised: -4/5; discounted by .5 as its turn is."""
    overlong = {"buffer_frac": 0.5}
    episodes = in_turns(1, 2, penalised_tokens=9), in_turns(0, 0)
    (sample, _), counts = samples_of(*episodes, overlong=overlong, turn_discount=0.5)
    assert sample.turn_rewards == pytest.approx((1, 2 - 0.8))
    assert sample.reward == pytest.approx(1 + 0.5 * 1.2)
    assert counts["reward/overlong"] == pytest.approx(-0.4)


@table("end", ["max_turns", "max_tokens"])
def test_episodes_that_a_limit_ended_are_masked_or_scored(end: EpisodeEnd) -> None:
    """Masked they have no weight, give no tokens to the mean, and stay in the baseline of their group."""
    episodes = (in_turns(1, 0), in_turns(0, 0, end=end), in_turns(0, 0))
    masked, counts = samples_of(*episodes, mask_truncated=True)
    assert [sample.weight for sample in masked] == pytest.approx([1 / 8, 0, 1 / 8])
    assert [sample.reward for sample in masked] == [1, 0, 0]
    assert counts["episodes/masked"] == 1
    scored, counts = samples_of(*episodes)
    assert [sample.weight for sample in scored] == pytest.approx([1 / 12] * 3)
    assert "episodes/masked" not in counts
    assert episode_metrics([Group(prompt=PROMPT, episodes=episodes)])["truncated_frac"] == pytest.approx(1 / 3)


def test_a_reward_for_each_turn() -> None:
    with pytest.raises(AssertionError, match="1 rewards for 2 turns"):
        samples_of(replace(in_turns(1, 2), score=Score(reward=1, accuracy=1, turns=(1,))), in_turns(0, 0))


def pairs(*episodes: tuple[float, int]) -> Group:
    """A group by the rewards and lengths of its episodes."""
    return Group(prompt=PROMPT, episodes=tuple(episode(reward, length, "all") for reward, length in episodes))


WEIGHED = [pairs((1, 1), (0, 4)), pairs((0.5, 2), (0.5, 10)), pairs((0, 5), (1, 3)), pairs((0, 6), (0, 9))]
"""The second and the last have no signal; 40 tokens in 8 completions."""


@table(
    ("aggregation", "expected"),
    [
        ("token-mean", [1 / 40] * 4),
        ("seq-mean-token-mean", [1 / 8, 1 / 32, 1 / 40, 1 / 24]),
        ("seq-mean-token-sum", [1 / 8] * 4),
        ("seq-mean-token-sum-norm", [1 / 80] * 4),
    ],
)
def test_weights_follow_the_aggregation_and_count_what_is_left_out(aggregation: str, expected: list[float]) -> None:
    batch, counts = make(WEIGHED, aggregation=aggregation)
    assert [len(sample.token_ids_T) for sample in batch.samples] == [1, 4, 5, 3]
    assert [sample.weight for sample in batch.samples] == pytest.approx(expected)
    assert counts["groups/skipped"] == 2


def test_the_overlong_penalty_reaches_the_reward() -> None:
    """A buffer of 0.4 x 10 tokens, from the 7th on; 3 / 4 of a token's share of the factor, at the limit all of it."""
    groups = [pairs((1, 6), (1, 10)), pairs((0.5, 7), (0, 9))]
    batch, counts = make(groups, overlong={"buffer_frac": 0.4, "penalty_factor": 2.0})
    rewards = [sample.reward for sample in batch.samples]
    assert rewards == pytest.approx([1, 1 - 2, 0.5 - 2 / 4, 0 - 2 * 3 / 4])
    assert counts["reward/overlong"] == pytest.approx(-(2 + 2 / 4 + 2 * 3 / 4) / 4)
    assert counts["groups/with_signal"] == 2, "what the penalty makes differ is a signal"
    plain, without = make(groups)
    assert [sample.reward for sample in plain.samples] == [0.5, 0], "equal rewards are left out without it"
    assert "reward/overlong" not in without


@table(
    ("settings", "kept"),
    [
        ({}, 2),
        ({"advantage": "reinforce++"}, 4),
        ({"advantage": "reinforce++_baseline"}, 4),
        ({"advantage": "gae"}, 4),
        ({"kl": {"coef": 0.1}}, 4),
        ({"advantage": "rloo"}, 2),
        ({"advantage": "dr_grpo"}, 2),
    ],
)
def test_groups_without_signal_stay_where_they_have_a_gradient(settings: dict[str, object], kept: int) -> None:
    batch, counts = make(WEIGHED, **settings)
    assert (len(batch.groups), len(batch.left_out), counts["groups/skipped"]) == (kept, 4 - kept, 4 - kept)
    assert len(make([pairs((0, 3)), pairs((0, 4))])[0].groups) == 2, "groups of one all stay"


def test_truncated_are_those_that_ended_at_the_limit() -> None:
    assert episode_metrics(WEIGHED)["truncated_frac"] == 1 / 8
    (turn,) = episode(0, 10, "all").turns
    stopped = replace(episode(0, 10, "all"), turns=(replace(turn, finish="stop"),))
    at_the_limit = [replace(WEIGHED[0], episodes=(stopped, episode(0, 10, "all"), episode(0, 10, "all")))]
    assert episode_metrics(at_the_limit)["truncated_frac"] == pytest.approx(2 / 3)


def sample(reward: float, tokens: int = 2, **fields: object) -> Sample:
    return sample_of(range(tokens), rollout_logprobs_T=floats(*[-1.0] * tokens), reward=reward, **fields)


def beside_reference(reward: float, *reference: float, **fields: object) -> Sample:
    """Of two tokens with old log-probs of -1."""
    return sample(reward, old_logprobs_T=floats(-1, -1), reference_logprobs_T=floats(*reference), **fields)


K1 = {"name": "reward", "estimator": "k1", "coef": 0.1}


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
    for place, value, tokens in ((0, 5 / 9, 2), (1, -4 / 9, 3), (equal_group, 1 / 18, 2)):
        assert found[place] == pytest.approx([value * by] * tokens, rel=1e-5)


def test_of_the_whole_step_a_kl_counts_for_what_comes_before_it() -> None:
    """Hu et al.: A_t = R - beta * sum of the KL from t on. Returns 0.9 1.0 and 0 0: mean 0.475, squares .425^2 +
    .525^2 + 2 * .475^2 = 0.9075, over 3 = 0.3025 = 0.55^2."""
    group = (beside_reference(1.0, -2, -1), beside_reference(0.0, -1, -1))
    found = advantages(batch(group), 0.1, advantage="reinforce++", kl={"name": "reward", "coef": 0.1})
    assert np.array(found) * 0.55 == pytest.approx(np.array([[0.425, 0.525], [-0.475, -0.475]]), rel=1e-5)


def test_a_kl_in_the_reward_is_taken_off_in_sum() -> None:
    """k1 of the first: (-1 + 2) + (-1 + 3) = 3, of the second 0. Rewards 1 - 0.1 * 3 = 0.7 and 0.5, mean 0.6."""
    group = (beside_reference(1.0, -2, -3), beside_reference(0.5, -1, -1))
    settings = {"advantage": "dr_grpo", "kl": K1}
    found = advantages(batch(group), 0.1, **settings)
    assert np.array(found) == pytest.approx(np.array([[0.1, 0.1], [-0.1, -0.1]]), abs=1e-6)
    _, metrics = with_advantages(batch(group), Algorithm.model_validate(settings), 0.1)
    figures = (metrics["kl/reward"], metrics["reward_kl"], metrics["kl/coef"])
    assert figures == pytest.approx((3 / 4, 0.3 / 2, 0.1))


PPO = {"advantage": {"name": "gae", "gamma": 0.5, "gae_lambda": 0.5}}


def test_gae_of_a_completion_by_hand_whitened_over_the_step() -> None:
    """Rewards 0, 1; values 0.2, 0.4: delta 1 = 1 - 0.4 = 0.6, delta 0 = 0.5 * 0.4 - 0.2 = 0, A = (0.15, 0.6).
    The other: reward 0, value 0.5, A = -0.5. Mean 1/12, unbiased variance 0.306..; returns are A + V before that."""
    first, second = sample(1.0, values_T=floats(0.2, 0.4)), sample(0.0, 1, values_T=floats(0.5))
    result, metrics = with_advantages(batch((first,), (second,)), Algorithm.model_validate(PPO), 0.0)
    raw = np.array([0.15, 0.6, -0.5])
    expected = (raw - raw.mean()) / raw.std(ddof=1)
    found, returns = (
        np.concatenate([getattr(s, key) for s in result.samples]) for key in ("advantages_T", "returns_T")
    )
    assert [len(s.token_ids_T) for s in result.samples] == [2, 1]
    np.testing.assert_allclose(found, expected, atol=1e-5)
    np.testing.assert_allclose(returns, [0.35, 1.0, 0.0], atol=1e-6)
    assert (metrics["value/mean"], metrics["return/mean"]) == pytest.approx((1.1 / 3, 1.35 / 3))


def test_a_kl_in_the_reward_falls_where_it_arises() -> None:
    """With gamma = lambda = 1 and values 0 a token's return is what is still to come: -0.1 off at token 0 only."""
    one = beside_reference(1.0, -2, -1, values_T=floats(0, 0))
    settings = Algorithm.model_validate({"advantage": "gae", "kl": K1})
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


def test_statistics_are_over_actions_and_an_empty_step_has_none() -> None:
    _, metrics = with_advantages(TWO_GROUPS, Algorithm(name="dr_grpo"), 0.0)
    values = np.array([0.5, 0.5, -0.5, -0.5, -0.5, 0, 0, 0, 0])
    found = [metrics[f"advantage/{name}"] for name in ("mean", "std", "max_abs")]
    assert found == pytest.approx([values.mean(), values.std(), 0.5], abs=1e-6)
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
    found = advantages(batch(group), 0.1, advantage="reinforce++", turn_discount=0.8, kl=K1)
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
