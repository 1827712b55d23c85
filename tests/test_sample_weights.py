"""What the settings make of a step's samples: weights by aggregation, the overlong penalty, which groups are kept."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fovea.config.algorithm import Algorithm
from fovea.samples import episode_metrics, make_batch
from fovea.types import Batch, Completion, Episode, Group, Metrics, Prompt, Score, Task
from tests.records import one_turn

PROMPT = Prompt(token_ids_L=np.arange(3), unexpanded_ids_U=np.arange(3))
MAX_NEW_TOKENS = 10


def group(*episodes: tuple[float, int]) -> Group:
    """Of pairs of a reward and a length."""
    return Group(prompt=PROMPT, episodes=tuple(episode(reward, length) for reward, length in episodes))


def episode(reward: float, length: int) -> Episode:
    completion = Completion(
        token_ids_T=np.arange(length),
        logprobs_T=np.zeros(length, dtype=np.float32),
        text="x",
        finish="length" if length == MAX_NEW_TOKENS else "stop",
        version=0,
    )
    score = Score(reward=reward, accuracy=0.0)
    return one_turn(Task(id="0", question="q", answer="a"), completion, score)


GROUPS = [group((1, 1), (0, 4)), group((0.5, 2), (0.5, 10)), group((0, 5), (1, 3)), group((0, 6), (0, 9))]
"""The second and the last have no signal; 40 tokens in 8 completions."""


def batch_of(groups: list[Group], **settings: object) -> tuple[Batch, Metrics]:
    return make_batch(groups, Algorithm.model_validate(settings), max_new_tokens=MAX_NEW_TOKENS)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token-mean", [1 / 40] * 4),
        ("seq-mean-token-mean", [1 / 8, 1 / 32, 1 / 40, 1 / 24]),
        ("seq-mean-token-sum", [1 / 8] * 4),
        ("seq-mean-token-sum-norm", [1 / 80] * 4),
    ],
)
def test_weights_follow_the_aggregation_and_count_what_is_left_out(aggregation: str, expected: list[float]) -> None:
    batch, counts = batch_of(GROUPS, aggregation=aggregation)
    assert [len(sample.token_ids_T) for sample in batch.samples] == [1, 4, 5, 3]
    assert [sample.weight for sample in batch.samples] == pytest.approx(expected)
    assert counts["groups/skipped"] == 2


def test_the_overlong_penalty_reaches_the_reward() -> None:
    """A buffer of 0.4 x 10 tokens, from the 7th on; 3 / 4 of a token's share of the factor, at the limit all of it."""
    groups = [group((1, 6), (1, 10)), group((0.5, 7), (0, 9))]
    batch, counts = batch_of(groups, overlong={"buffer_frac": 0.4, "penalty_factor": 2.0})
    rewards = [sample.reward for sample in batch.samples]
    assert rewards == pytest.approx([1, 1 - 2, 0.5 - 2 / 4, 0 - 2 * 3 / 4])
    assert counts["reward/overlong"] == pytest.approx(-(2 + 2 / 4 + 2 * 3 / 4) / 4)
    assert counts["groups/with_signal"] == 2, "what the penalty makes differ is a signal"
    plain, without = batch_of(groups)
    assert [sample.reward for sample in plain.samples] == [0.5, 0], "equal rewards are left out without it"
    assert "reward/overlong" not in without


@pytest.mark.parametrize(
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
    ids=str,
)
def test_groups_without_signal_stay_where_they_have_a_gradient(settings: dict[str, object], kept: int) -> None:
    batch, counts = batch_of(GROUPS, **settings)
    assert (len(batch.groups), len(batch.left_out)) == (kept, 4 - kept)
    assert counts["groups/skipped"] == 4 - kept


def test_groups_of_one_all_stay() -> None:
    assert len(batch_of([group((0, 3)), group((0, 4))])[0].groups) == 2


def test_truncated_are_those_that_ended_at_the_limit() -> None:
    assert episode_metrics(GROUPS)["truncated_frac"] == 1 / 8
    (turn,) = episode(0, 10).turns
    stopped = replace(episode(0, 10), turns=(replace(turn, finish="stop"),))
    at_the_limit = [replace(GROUPS[0], episodes=(stopped, episode(0, 10), episode(0, 10)))]
    assert episode_metrics(at_the_limit)["truncated_frac"] == pytest.approx(2 / 3)
