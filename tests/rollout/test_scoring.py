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
from typing import Literal

import numpy as np
import pytest

from fovea.data.prompt_source import PromptedTask
from fovea.errors import TrainError
from fovea.loop import train
from fovea.metrics.log import read_metrics
from fovea.report.samples import read_step
from fovea.rollout.collect import Interaction, collect
from fovea.run.context import Run
from fovea.types import Completion, Group, Request, Sampling
from fovea_gym.environments.custom.grader import UserGrader
from fovea_gym.errors import ScoreError, UnscoredError
from fovea_gym.graders.grading import CallLimits, CallThreads, Grading, LimitedCalls
from fovea_gym.types import Score, Task, Turn
from fovea_gym.utils.event_loop import wait_for
from gym_tests.bandit import BanditEnvironment, graded
from tests.fakes import BanditRenderer, bandit_run

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


def slow_grading(slow: Slow, on_failure: Literal["error", "drop"] = "drop") -> Grading:
    return graded_by(slow.score, on_failure)


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
        ids, logprobs = np.array([place]), np.zeros(1, dtype=np.float32)
        return [
            Completion(token_ids_T=ids, logprobs_T=logprobs, text="abcd"[k % 4], finish="stop", version=0)
            for k in range(n)
        ]


def collected(grading: Grading, engine: Ticking, unscored: list[str] | None = None) -> list[Group]:
    environment = BanditEnvironment()
    tasks = environment.tasks("train")[:NUM_GROUPS]
    renderer = BanditRenderer()
    prompted = [PromptedTask(task=task, prompt=renderer.prompt(environment.prompt(task))) for task in tasks]
    sampling = Sampling(max_new_tokens=1)
    return wait_for(
        collect(
            engine,  # type: ignore[arg-type]
            Interaction(environment=environment, grading=grading, renderer=renderer),
            prompted,
            sampling=sampling,
            n=NUM_COMPLETIONS,
            seed=(0,),
            unscored=unscored,
        )
    )


def told(groups: Sequence[Group]) -> list[tuple[str, list[str], list[float]]]:
    return [
        (
            group.episodes[0].task.id,
            [episode.last.text for episode in group.episodes],
            [episode.score.reward for episode in group.episodes],
        )
        for group in groups
    ]


def test_threads_change_neither_order_nor_scores() -> None:
    slow = Slow()
    assert told(collected(slow_grading(slow), Ticking())) == told(collected(graded(BanditEnvironment()), Ticking()))
    assert 1 < slow.most_running <= AT_ONCE
    assert threading.get_ident() not in slow.threads


def test_drawing_goes_on_while_scoring_waits() -> None:
    """No score comes before the last group is sampled: in turn, the first one would wait for ever."""
    engine = Ticking()
    waited: list[bool] = []

    def score(task: Task, turns: Sequence[Turn]) -> Score:
        waited.append(engine.all_are_drawn.wait(LIMIT_SECONDS))
        return BanditEnvironment().score(task, turns)

    collected(graded_by(score), engine)
    assert waited == [True] * NUM_GROUPS * NUM_COMPLETIONS


def test_a_group_that_cannot_be_scored_is_left_out_and_named() -> None:
    slow = Slow(KeyError("away"), bad=("train/1", "train/3"))
    unscored: list[str] = []
    groups = collected(slow_grading(slow), Ticking(), unscored)
    assert [group.episodes[0].task.id for group in groups] == ["train/0", "train/2", "train/4"]
    assert [text.partition(" at ")[0] for text in sorted(unscored)] == [
        f"train/{n}: slow raised KeyError: 'away'" for n in (1, 3)
    ]


def test_without_a_list_or_with_another_error_it_raises() -> None:
    with pytest.raises(UnscoredError, match=r"^train/1: slow raised KeyError: 'away' at .*test_scoring\.py:\d+$"):
        collected(slow_grading(Slow(KeyError("away"), bad=("train/1",))), Ticking())
    with pytest.raises(
        ScoreError, match=r"^train/1: slow raised KeyError: 'broken' at .*; fix it, or set reward_on_failure="
    ):
        collected(slow_grading(Slow(KeyError("broken"), bad=("train/1",)), "error"), Ticking(), [])


def with_grading(run: Run, grading: Grading) -> Run:
    return replace(run, stream=replace(run.stream, grading=grading))


def test_only_a_completion_without_a_score_is_left_out(tmp_path: Path) -> None:
    """As TRL does with None; `drop` leaves out its group."""
    num_calls = itertools.count()

    async def score(task: Task, turns: Sequence[Turn]) -> float | None:
        none = task.id == "train/2" and next(num_calls) % 4 == 1
        return None if none else BanditEnvironment().score(task, turns).reward

    for policy, unscored, failed in (("drop_completion", 0, 1), ("drop", 1, None)):
        limits = CallLimits(name="mine", on_failure=policy, calls_at_once=AT_ONCE)  # type: ignore[arg-type]
        grading = Grading(graders=(UserGrader(score, CallThreads("mine")),), calls=LimitedCalls(limits))
        rollout = {"prompts_per_step": 16, "samples_per_prompt": 4, "max_new_tokens": 1}
        train(with_grading(bandit_run(tmp_path / policy, max_steps=2, rollout=rollout), grading))
        rows = read_metrics(tmp_path / policy)
        assert [row["groups/unscored"] for row in rows] == [unscored] * 2
        assert [row.get("episodes/failed") for row in rows] == [failed] * 2
        assert [row.get("episodes/failed_score") for row in rows] == [failed] * 2
        noted = (tmp_path / policy / "unscored.jsonl").read_text(encoding="utf-8").splitlines()
        assert [json.loads(line)["step"] for line in noted] == [0, 1]
        assert all("train/2: mine returned None, which is not a number" in line for line in noted)
        answers = [len(group.answers) for group in read_step(tmp_path / policy, 1)]
        assert min(answers) == (3 if failed else 4)


def test_a_run_counts_what_was_not_scored(tmp_path: Path) -> None:
    slow = Slow(KeyError("away"), bad=("train/2",))
    run = bandit_run(
        tmp_path, max_steps=2, rollout={"prompts_per_step": 16, "samples_per_prompt": 2, "max_new_tokens": 1}
    )
    train(with_grading(run, slow_grading(slow)))
    assert [row["groups/unscored"] for row in read_metrics(tmp_path)] == [1, 1]
    noted = [json.loads(line) for line in (tmp_path / "unscored.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [each["step"] for each in noted] == [0, 1]
    assert all(each["reason"].startswith("train/2: slow raised KeyError: 'away' at ") for each in noted)


def test_a_step_in_which_nothing_is_scored_stops_the_run(tmp_path: Path) -> None:
    slow = Slow(KeyError("away"), bad=[f"train/{n}" for n in range(16)])
    run = with_grading(bandit_run(tmp_path, max_steps=1), slow_grading(slow))
    with pytest.raises(
        TrainError, match=r"none of the 8 groups of step 0 could be scored; the last error: train/\d+: slow raised"
    ):
        train(run)


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
