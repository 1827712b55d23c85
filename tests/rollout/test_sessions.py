"""Sessions of episodes: calls at once, deadlines, failures that cost an episode, closing."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from fovea_gym.environments.access import GradedEnvironment, Part
from fovea_gym.environments.mixture import Mixture
from fovea_gym.errors import SessionError
from fovea_gym.graders.base import TryAgainError
from fovea_gym.graders.grading import Grading
from fovea_gym.types import Message, Score, Task, Turn
from fovea_gym.utils.event_loop import wait_for
from tests.rollout.sessions import MORE, Echo, Rows, limited, rolled_out, sampled

WAIT_SECONDS = 1.0
NUM_EPISODES = 512


class SlowReplies(Rows):
    """Every reply waits for a second; all of them do so at once, or the test fails."""

    def __init__(self) -> None:
        self.most_waiting = self.waiting = 0
        self.lock = threading.Lock()

    @contextmanager
    def counted(self) -> Iterator[None]:
        with self.lock:
            self.waiting += 1
            self.most_waiting = max(self.most_waiting, self.waiting)
        yield
        with self.lock:
            self.waiting -= 1


class SlowAsync(SlowReplies):
    async def reply(self, task: Task, turns: Sequence[Turn]) -> list[Message]:
        with self.counted():
            await asyncio.sleep(WAIT_SECONDS)
        return MORE


class SlowInThreads(SlowReplies):
    def reply(self, task: Task, turns: Sequence[Turn]) -> list[Message]:
        with self.counted():
            time.sleep(WAIT_SECONDS)
        return MORE


@pytest.mark.parametrize("kind", [SlowAsync, SlowInThreads])
def test_replies_of_512_episodes_wait_side_by_side(kind: type[SlowReplies]) -> None:
    user, begun = kind(), time.perf_counter()
    rollout = rolled_out(limited(user), rows=64, n=8)
    seconds = time.perf_counter() - begun
    assert [len(episode.turns) for episode in rollout.episodes] == [2] * NUM_EPISODES
    # one after the other they would take 512 s; a busy machine starts 512 threads slowly
    assert seconds < 20 * WAIT_SECONDS
    assert user.most_waiting > NUM_EPISODES / 20
    assert rollout.log.metrics()["seconds/replies"] >= WAIT_SECONDS


class Game:
    """A session that notes its calls: the episode ends after as many turns as it is told."""

    def __init__(self, owner: Games, task: Task, seed: int) -> None:
        self.owner, self.task, self.seed = owner, task, seed

    def note(self, call: str) -> None:
        self.owner.calls[self.task.id, self.seed, call] += 1
        self.owner.tasks_of[self.task.id, self.seed].add(asyncio.current_task())

    async def reply(self, turns: Sequence[Turn]) -> Sequence[Message] | None:
        self.note("reply")
        return await self.owner.on_reply(self.task, self.seed, turns)

    async def score(self, turns: Sequence[Turn]) -> Score:
        self.note("score")
        return Score(reward=10.0 * len(turns), accuracy=0.5, turns=(10.0,) * len(turns))

    async def close(self) -> None:
        # a session has time to say goodbye, whatever ended its episode
        await asyncio.sleep(0.01)
        self.note("close")
        self.owner.open_now -= 1


class Games(Rows):
    """Sessions whose replies are given; three turns."""

    max_turns = 3

    def __init__(self, on_reply: Callable[[Task, int, Sequence[Turn]], Any] | None = None) -> None:
        self.given = on_reply
        self.calls: Counter[tuple[str, int, str]] = Counter()
        self.tasks_of: dict[tuple[str, int], set[object]] = {}
        self.open_now = self.most_open = 0

    async def on_reply(self, task: Task, seed: int, turns: Sequence[Turn]) -> Any:
        return MORE if self.given is None else await self.given(task, seed, turns)

    async def open(self, task: Task, seed: int) -> Game:
        self.tasks_of[task.id, seed] = {asyncio.current_task()}
        self.open_now += 1
        self.most_open = max(self.most_open, self.open_now)
        return Game(self, task, seed)

    def times(self, call: str) -> list[int]:
        return [self.calls[task, seed, call] for task, seed in self.tasks_of]


def test_a_session_replies_scores_and_is_closed_in_one_task_and_has_its_own_seed() -> None:
    games = Games()
    rollout = rolled_out(limited(games))
    assert [episode.score.reward for episode in rollout.episodes] == [30.0] * 8
    assert rollout.episodes[0].score.turns == (10.0, 10.0, 10.0)
    assert {episode.end for episode in rollout.episodes} == {"max_turns"}
    assert games.times("reply") == [2] * 8
    assert games.times("score") == games.times("close") == [1] * 8
    # cancel scopes of anyio, as in MCP's client, are left in the task that entered them
    assert {len(tasks) for tasks in games.tasks_of.values()} == {1}
    assert len({seed for _, seed in games.tasks_of}) == 8
    again = Games()
    rolled_out(limited(again))
    assert again.tasks_of.keys() == games.tasks_of.keys()


def test_no_more_sessions_are_open_at_once_than_the_settings_say() -> None:
    for engine in (Echo(), Echo(repeats_in_rounds=True)):
        games = Games()
        rollout = rolled_out(limited(games, max_concurrent=3), rows=5, n=2, engine=engine)
        assert (len(rollout.episodes), games.most_open, games.open_now) == (10, 3, 0)


def failing(how: str) -> Callable[..., Any]:
    """Replies of which the second of a task hangs, raises, or is a number."""

    async def on_reply(task: Task, seed: int, turns: Sequence[Turn]) -> Any:
        if task.id != "train/1" or len(turns) != 2:
            return MORE
        if how == "hangs":
            await asyncio.sleep(600)
        if how == "raises":
            raise KeyError("no such page")
        return 7

    return on_reply


@pytest.mark.parametrize(
    ("how", "reason", "told"),
    [
        ("hangs", "deadline", "Games.reply took more than environment.session.deadline_seconds=0.3"),
        ("raises", "reply", r"Games.reply raised KeyError: 'no such page' at .*test_sessions.py:\d+"),
        ("returns 7", "reply", r"Games.reply returned 7 \(of type int\); return a list of .*Message"),
    ],
)
def test_a_failure_costs_the_episode_is_named_and_the_session_is_closed(how: str, reason: str, told: str) -> None:
    for engine in (Echo(), Echo(repeats_in_rounds=True)):
        games = Games(failing(how))
        rollout = rolled_out(limited(games, deadline_seconds=0.3), engine=engine)
        assert [group.episodes[0].task.id for group in rollout.groups] == ["train/0", "train/2", "train/3"]
        assert len(rollout.unscored) == 1, "all episodes of one group failed"
        assert {failure.reason for failure in rollout.log.failures} == {reason}
        assert rollout.log.metrics()["episodes/failed"] == rollout.log.metrics()[f"episodes/failed_{reason}"] == 2
        assert games.times("close") == [1] * 8
        with pytest.raises(SessionError, match=f"train/1: {told}.*environment.session.on_failure=drop"):
            rolled_out(limited(Games(failing(how)), deadline_seconds=0.3, on_failure="stop"))


def test_a_group_trains_on_its_remaining_episodes() -> None:
    """One of 20 replies hangs: the rollout ends at the deadline, and the group of the episode is one smaller."""
    hanging = list[int]()

    async def one_hangs(task: Task, seed: int, turns: Sequence[Turn]) -> Any:
        if task.id != "train/2" or hanging:
            return MORE
        hanging.append(seed)
        await asyncio.sleep(600)

    begun = time.perf_counter()
    rollout = rolled_out(limited(Games(one_hangs), deadline_seconds=1.0), rows=5, n=4)
    assert time.perf_counter() - begun < 10
    assert [len(group.episodes) for group in rollout.groups] == [4, 4, 3, 4, 4]
    assert not rollout.unscored


def test_an_episode_that_is_left_alone_is_left_out() -> None:
    """It has none to be compared with, and without a baseline its advantage would be its reward."""
    alone = list[int]()

    async def all_but_one(task: Task, seed: int, turns: Sequence[Turn]) -> Sequence[Message]:
        if task.id == "train/1" and seed not in alone:
            if alone:
                raise KeyError("no such page")
            alone.append(seed)
        return MORE

    rollout = rolled_out(limited(Games(all_but_one)), n=3)
    assert [group.episodes[0].task.id for group in rollout.groups] == ["train/0", "train/2", "train/3"]
    (reason,) = rollout.unscored
    assert reason.startswith("all but one of 3 episodes failed; the last error: train/1: Games.reply raised KeyError")
    assert rollout.log.metrics()["episodes/failed"] == 2


def test_a_failed_episode_may_have_a_reward() -> None:
    rollout = rolled_out(limited(Games(failing("raises")), on_failure="reward", failure_reward=-2.0))
    failed = [episode for episode in rollout.episodes if episode.task.id == "train/1"]
    assert [(episode.score.reward, len(episode.turns)) for episode in failed] == [(-2.0, 2)] * 2
    assert rollout.log.metrics()["episodes/failed"] == 2


def test_sessions_are_closed_when_the_rollout_is_cancelled() -> None:
    """As by Ctrl-C: the cancellation comes while replies hang, and comes once more while sessions close."""
    asked = threading.Event()

    async def hangs(task: Task, seed: int, turns: Sequence[Turn]) -> None:
        asked.set()
        await asyncio.sleep(600)

    games = Games(hangs)

    async def cancelled() -> None:
        running = asyncio.ensure_future(sampled(limited(games), Echo()))
        while not asked.is_set():
            await asyncio.sleep(0.001)
        running.cancel()
        await asyncio.sleep(0.005)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.wait([running])
        assert running.cancelled()

    wait_for(cancelled())
    assert games.times("close") == [1] * len(games.tasks_of)
    assert games.open_now == 0


def test_what_has_no_state_is_tried_again_and_a_session_only_where_it_asks_for_that() -> None:
    class Flaky(Rows):
        num_calls = 0

        async def reply(self, task: Task, turns: Sequence[Turn]) -> list[Message]:
            self.num_calls += 1
            if self.num_calls == 1:
                raise ConnectionError("busy")
            return MORE

    flaky = Flaky()
    assert len(rolled_out(limited(flaky, retries=1), rows=1, n=1).episodes) == 1
    assert flaky.num_calls == 2

    for error, num_replies in ((ConnectionError("busy"), 1), (TryAgainError("is busy"), 2)):

        async def raises(task: Task, seed: int, turns: Sequence[Turn], error: Exception = error) -> None:
            raise error

        games = Games(raises)
        rollout = rolled_out(limited(games, retries=1), rows=1, n=1)
        assert games.times("reply") == [num_replies]
        assert rollout.log.failures[0].reason == "reply"


def test_an_episode_ends_before_a_turn_that_might_not_fit() -> None:
    # 1 of the prompt, then 1 of an answer and 2 of a reply each turn
    for max_tokens, num_turns in ((3, 1), (4, 1), (5, 2), (8, 3)):
        (episode, *_) = rolled_out(limited(Games()), max_tokens=max_tokens).episodes
        assert (len(episode.turns), episode.end) == (num_turns, "max_turns" if num_turns == 3 else "max_tokens")
        tokens = sum(turn.observation.num_tokens + len(turn.completion.token_ids_T) for turn in episode.tokens)
        assert tokens <= max_tokens or num_turns == 1


def test_rounds_send_the_same_requests_whichever_reply_comes_first() -> None:
    def order(seed: int) -> Sequence[str]:
        random = np.random.default_rng(seed)

        async def late(task: Task, seed: int, turns: Sequence[Turn]) -> Sequence[Message] | None:
            await asyncio.sleep(random.uniform(0, 0.03))
            return None if (seed + len(turns)) % 5 == 0 else MORE

        engine = Echo(repeats_in_rounds=True)
        rolled_out(limited(Games(late), max_concurrent=7), rows=5, n=4, engine=engine)
        return engine.ids

    first = order(0)
    assert len(first) > 5 * 5
    assert first == order(1) == order(2)


def test_a_mixture_hands_sessions_to_its_parts_and_each_part_keeps_its_most_turns() -> None:
    class Asks(Rows):
        async def reply(self, task: Task, turns: Sequence[Turn]) -> list[Message]:
            return MORE

    games = Games()
    made = {"games": limited(games, max_concurrent=3), "asks": limited(Asks())}
    parts = {name: Part(environment=each.environment, grading=each.grading, share=1.0) for name, each in made.items()}
    mixture = Mixture(parts)
    grading = Grading(graders=mixture.graders, parts=tuple(each.grading for each in made.values()))
    rollout = rolled_out(GradedEnvironment(environment=mixture, grading=grading), rows=4, n=2)
    found = [(episode.task.kind, len(episode.turns), episode.score.reward) for episode in rollout.episodes]
    assert found == [("games", 3, 30.0), ("games", 3, 30.0), ("asks", 2, 2.0), ("asks", 2, 2.0)] * 2
    assert games.most_open <= 3
    assert games.times("close") == [1] * 4
