"""Scoring that waits: calls at once, while drawing, in the order of the requests; groups left out."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from fovea.errors import TrainError
from fovea.loop import train
from fovea.metrics.log import read_metrics
from fovea.report.samples import read_step
from fovea.types import Completion, Group, Request
from fovea_gym.environments.access import GradedEnvironment
from fovea_gym.environments.custom.grader import UserGrader
from fovea_gym.errors import ScoreError, UnscoredError
from fovea_gym.graders.grading import CallLimits, CallThreads, Grading, LimitedCalls
from fovea_gym.types import Score, Task, Turn
from fovea_gym.utils.event_loop import wait_for
from gym_tests.bandit import BanditEnvironment, graded
from tests.fakes import bandit_run
from tests.records import completion_of
from tests.rollout.sessions import sampled

NUM_GROUPS, NUM_COMPLETIONS, AT_ONCE = 5, 3, 4
WAIT_SECONDS = 0.05
LIMIT_SECONDS = 20.0


class Slow:
    """Waits before it scores, and notes who runs meanwhile; some tasks cannot be scored."""

    def __init__(self, error: Exception | None = None, bad: Sequence[str] = ()) -> None:
        self.error, self.bad = error, bad
        self.lock = threading.Lock()
        self.running = self.most_running = 0
        self.threads: set[int] = set()

    def score(self, task: Task, turns: Sequence[Turn]) -> Score:
        with self.lock:
            self.running += 1
            self.most_running = max(self.most_running, self.running)
            self.threads.add(threading.get_ident())
        # the first to begin is the last to end
        time.sleep(WAIT_SECONDS * (1 + (task.id == "train/0")))
        with self.lock:
            self.running -= 1
        if self.error is not None and task.id in self.bad:
            raise self.error
        return BanditEnvironment().score(task, turns)


def graded_by(score: Callable[[Task, Sequence[Turn]], Score], on_failure: Literal["error", "drop"] = "drop") -> Grading:
    limits = CallLimits(name="slow", settings="reward_", calls_at_once=AT_ONCE, on_failure=on_failure)
    return Grading(graders=(UserGrader(score, CallThreads("slow")),), calls=LimitedCalls(limits))


class Ticking:
    """Draws one group after the other, and says when the last one is sampled: scoring must not hold it up."""

    def __init__(self) -> None:
        self.num_sampled = 0
        self.all_are_drawn = threading.Event()

    async def generate(self, request: Request) -> Sequence[Completion]:
        place, n = int(request.prompt.token_ids_L[0]), request.n
        await asyncio.sleep(0.002 * (place + 1))
        self.num_sampled += 1
        if self.num_sampled == NUM_GROUPS:
            self.all_are_drawn.set()
        return [completion_of([place], text="abcd"[k % 4]) for k in range(n)]


def collected(grading: Grading, engine: Ticking, unscored: list[str] | None = None) -> list[Group]:
    made = GradedEnvironment(environment=BanditEnvironment(), grading=grading)
    return wait_for(sampled(made, engine, NUM_GROUPS, NUM_COMPLETIONS, unscored=unscored))


def told(groups: Sequence[Group]) -> list[tuple[str, str, float]]:
    episodes = [episode for group in groups for episode in group.episodes]
    return [(episode.task.id, episode.last.text, episode.score.reward) for episode in episodes]


def test_threads_change_neither_order_nor_scores() -> None:
    slow = Slow()
    assert told(collected(graded_by(slow.score), Ticking())) == told(collected(graded(BanditEnvironment()), Ticking()))
    assert 1 < slow.most_running <= AT_ONCE
    assert threading.get_ident() not in slow.threads


def test_drawing_goes_on_while_scoring_waits() -> None:
    """No score comes before the last group is sampled: in turn, the first one would wait for ever."""
    engine, waited = Ticking(), list[bool]()

    def score(task: Task, turns: Sequence[Turn]) -> Score:
        waited.append(engine.all_are_drawn.wait(LIMIT_SECONDS))
        return BanditEnvironment().score(task, turns)

    collected(graded_by(score), engine)
    assert waited == [True] * NUM_GROUPS * NUM_COMPLETIONS


def test_a_group_that_cannot_be_scored_is_left_out_and_named() -> None:
    slow, unscored = Slow(KeyError("away"), bad=("train/1", "train/3")), list[str]()
    groups = collected(graded_by(slow.score), Ticking(), unscored)
    assert [group.episodes[0].task.id for group in groups] == ["train/0", "train/2", "train/4"]
    expected = [f"train/{n}: slow raised KeyError: 'away'" for n in (1, 3)]
    assert [text.partition(" at ")[0] for text in sorted(unscored)] == expected


def test_without_a_list_or_with_another_error_it_raises() -> None:
    with pytest.raises(UnscoredError, match=r"^train/1: slow raised KeyError: 'away' at .*test_scoring\.py:\d+$"):
        collected(graded_by(Slow(KeyError("away"), bad=("train/1",)).score), Ticking())
    with pytest.raises(
        ScoreError, match=r"^train/1: slow raised KeyError: 'broken' at .*; fix it, or set reward_on_failure="
    ):
        collected(graded_by(Slow(KeyError("broken"), bad=("train/1",)).score, "error"), Ticking(), [])


def run_graded(folder: Path, grading: Grading, *, n: int) -> list[dict[str, Any]]:
    """The lines of `unscored.jsonl` of a run of two steps in which every task has `n` completions."""
    rollout = {"prompts_per_step": 16, "samples_per_prompt": n, "max_new_tokens": 1}
    run = bandit_run(folder, max_steps=2, rollout=rollout)
    train(replace(run, stream=replace(run.stream, grading=grading)))
    return [json.loads(line) for line in (folder / "unscored.jsonl").read_text(encoding="utf-8").splitlines()]


def test_only_a_completion_without_a_score_is_left_out(tmp_path: Path) -> None:
    """As TRL does with None; `drop` leaves out its group."""
    num_calls = itertools.count()

    async def score(task: Task, turns: Sequence[Turn]) -> float | None:
        none = task.id == "train/2" and next(num_calls) % 4 == 1
        return None if none else BanditEnvironment().score(task, turns).reward

    for policy, unscored, failed in (("drop_completion", 0, 1), ("drop", 1, None)):
        limits = CallLimits(name="mine", on_failure=policy, calls_at_once=AT_ONCE)  # type: ignore[arg-type]
        grading = Grading(graders=(UserGrader(score, CallThreads("mine")),), calls=LimitedCalls(limits))
        noted = run_graded(tmp_path / policy, grading, n=4)
        names = ("groups/unscored", "episodes/failed", "episodes/failed_score")
        rows = [tuple(row.get(name) for name in names) for row in read_metrics(tmp_path / policy)]
        assert rows == [(unscored, failed, failed)] * 2
        assert [line["step"] for line in noted] == [0, 1]
        assert all("train/2: mine returned None, which is not a number" in str(line) for line in noted)
        answers = [len(group.answers) for group in read_step(tmp_path / policy, 1)]
        assert min(answers) == (3 if failed else 4)


def test_a_run_counts_what_was_not_scored(tmp_path: Path) -> None:
    noted = run_graded(tmp_path, graded_by(Slow(KeyError("away"), bad=("train/2",)).score), n=2)
    assert [row["groups/unscored"] for row in read_metrics(tmp_path)] == [1, 1]
    assert [each["step"] for each in noted] == [0, 1]
    assert all(each["reason"].startswith("train/2: slow raised KeyError: 'away' at ") for each in noted)


def test_a_step_in_which_nothing_is_scored_stops_the_run(tmp_path: Path) -> None:
    slow = Slow(KeyError("away"), bad=[f"train/{n}" for n in range(16)])
    with pytest.raises(
        TrainError, match=r"none of the 16 groups of step 0 could be scored; .*: train/\d+: slow raised"
    ):
        run_graded(tmp_path, graded_by(slow.score), n=2)


def test_a_grader_that_never_waits_gets_neither_a_thread_nor_a_task() -> None:
    """All answers of a group are scored in the task that drew them."""
    seen: list[tuple[int, object]] = []

    class Notes:
        async def score(self, task: Task, turns: Sequence[Turn]) -> Score:
            seen.append((threading.get_ident(), asyncio.current_task()))
            return BanditEnvironment().score(task, turns)

    collected(Grading(graders=(Notes(),)), Ticking())
    assert len(seen) == NUM_GROUPS * NUM_COMPLETIONS
    assert {thread for thread, _ in seen} == {threading.get_ident()}
    assert len({task for _, task in seen}) == NUM_GROUPS
