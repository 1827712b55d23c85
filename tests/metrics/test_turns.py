"""Metrics by turn and tool, with numbers by hand, and names that no text of a model adds to."""

from __future__ import annotations

import numpy as np
import pytest

from fovea.metrics.names import undefined
from fovea.metrics.turns import turn_metrics
from fovea.types import Completion, Episode, EpisodeEnd, SampledTurn, TurnTokens
from fovea_gym.types import Message, Score, Task, Turn
from tests.records import text_prompt

TASK = Task(id="train/0", question="q", answer="a")


def turn(*logprobs: float, messages: tuple[Message, ...] = (), seconds: float = 0.0) -> Turn:
    ids, values = np.arange(len(logprobs)), np.array(logprobs, dtype=np.float32)
    completion = Completion(token_ids_T=ids, logprobs_T=values, text="x", finish="stop", version=0)
    tokens = TurnTokens(observation=text_prompt([0]), completion=completion)
    return SampledTurn(messages=messages, text="x", tokens=tokens, seconds=seconds)


def episode(*turns: Turn, rewards: tuple[float, ...] = (), end: EpisodeEnd = "done") -> Episode:
    return Episode(task=TASK, turns=turns, score=Score(reward=sum(rewards), accuracy=0, turns=rewards), end=end)


def result(tool: str, failed: bool = False) -> Message:
    return Message(role="tool", parts=("42",), tool=tool, failed=failed)


def test_numbers_by_hand() -> None:
    long = episode(
        turn(-1, -2),
        turn(-0.5, messages=(result("zoom"), result("zoom")), seconds=2),
        turn(-0.5, -0.5, -0.5, messages=(result("mesure", failed=True),), seconds=4),
        rewards=(0, 0.5, 1),
        end="max_turns",
    )
    short = episode(turn(-3, -4, -5, -6), rewards=(0.25,))
    metrics = turn_metrics([long, short])
    assert metrics == pytest.approx(
        {
            "turns/mean": 2,
            "turns/max": 3,
            "turns/limit_frac": 0.5,
            "turns/token_limit_frac": 0,
            "seconds/reply_max": 4,
            "turns/1/tokens": 3,
            "turns/1/entropy": 21 / 6,
            "turns/1/reward": 0.125,
            "turns/2/tokens": 1,
            "turns/2/entropy": 0.5,
            "turns/2/reward": 0.5,
            "turns/3/tokens": 3,
            "turns/3/entropy": 0.5,
            "turns/3/reward": 1,
            "tools/calls/zoom": 1,
            "tools/failed_frac": 1 / 3,
        }
    )
    assert undefined(metrics) == []


def test_an_answer_that_an_environment_could_not_read_is_no_failed_call() -> None:
    """Nine of ten moves of a game are played: the share of failed calls was 1, since only failures were counted."""
    played, unread = (Message(role="user", parts=("x",), failed=failed) for failed in (False, True))
    replies = [turn(-1, messages=(played,)) for _ in range(9)]
    metrics = turn_metrics([episode(turn(-1), *replies, turn(-1, messages=(unread,)))])
    assert metrics["turns/unread_frac"] == pytest.approx(0.1)
    assert not [name for name in metrics if name.startswith("tools/")]
    assert undefined(metrics) == []


def test_long_episodes_and_many_tools_have_few_names() -> None:
    calls = [(result(f"tool{number}"), result("often")) for number in range(59)]
    odd = (result("<b>\n"), result("x" * 65), result("says the model", failed=True))
    metrics = turn_metrics([episode(turn(-1), *(turn(-1, messages=(*call, *odd)) for call in calls))])
    numbered = {name.split("/")[1] for name in metrics if name.endswith("/tokens")}
    assert numbered == {*map(str, range(1, 10)), "10+"}
    tools = {name: count for name, count in metrics.items() if name.startswith("tools/calls/")}
    assert len(tools) == 21
    assert (tools["tools/calls/often"], tools["tools/calls/other"]) == (59, 2 * 59 + 40)
    assert undefined(metrics) == []
