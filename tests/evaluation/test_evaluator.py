"""Answers of an engine to every row of a source."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fovea.data.prompt_source import PromptSource
from fovea.evaluation.baselines import baseline_answers, majority_answers
from fovea.evaluation.evaluator import EngineAnswers, Evaluator
from fovea.run.context import Run
from fovea.run.lifecycle import begin
from fovea.types import Sampling
from fovea_gym.environments.custom.grader import UserGrader
from fovea_gym.errors import DataError, ScoreError, UnscoredError
from fovea_gym.graders.grading import CallLimits, CallThreads, Grading, LimitedCalls
from fovea_gym.types import Score, Task, Turn
from fovea_gym.utils.event_loop import wait_for
from gym_tests.bandit import BanditEnvironment, graded
from tests.fakes import BanditEngine, BanditRenderer, bandit_run


@pytest.fixture
def begun(tmp_path: Path) -> Run:
    run = bandit_run(tmp_path)
    wait_for(begin(run))
    return run


def test_accuracy_is_by_kind_over_every_row_once(begun: Run) -> None:
    """The table prefers "a" for every prompt: right for 4 of 16 rows, all of one kind."""
    run = begun
    run.policy.table[:, 0] = 5.0  # type: ignore[attr-defined]
    wait_for(run.weight_sync.sync(0))
    evaluation = wait_for(run.evaluator.evaluate(run.sources.test))
    assert {kind: len(values) for kind, values in evaluation.accuracies.items()} == {"kind 0": 8, "kind 1": 8}
    assert sum(evaluation.accuracies["kind 0"]) == 4
    assert evaluation.accuracy == 4 / 16
    assert wait_for(run.evaluator.evaluate(run.sources.test, size=6)).num_rows == 6


def test_sampled_answers_are_seeded_and_differ_from_batch_to_batch(begun: Run) -> None:
    """A table without preferences: four answers are equally likely for all of 16 rows, in batches of 5."""
    sampling = Sampling(max_new_tokens=1, temperature=1.0)

    def texts(seed: int) -> list[str]:
        rows = wait_for(begun.evaluator.answers(begun.sources.test, sampling=sampling, n=8, seed=seed))
        assert [row.index for row in rows] == list(range(16))
        return ["".join(answer.text for answer in row.answers) for row in rows]

    first = texts(seed=0)
    assert first == texts(seed=0)
    assert first != texts(seed=1)
    assert len(set(first)) == 16, "no two rows draw alike"


class Gaps(Sequence[Task]):
    """Tasks of which every third cannot be read."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = tasks

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        if index % 3 == 0:
            raise DataError(f"row {index} is empty")
        return self._tasks[index]


TEST = BanditEnvironment().tasks("test")


def source_of(tasks: Sequence[Task] = TEST) -> PromptSource:
    limits: Any = {"max_prompt_tokens": 10, "on_bad_row": "skip", "cache_gib": 0.0}
    return PromptSource(tasks, BanditEnvironment(), BanditRenderer(), **limits)


def test_bad_rows_are_left_out_and_the_others_keep_their_place(begun: Run) -> None:
    source = source_of(Gaps(BanditEnvironment().tasks("test")))
    rows = wait_for(begun.evaluator.answers(source, 9))
    assert [(row.index, row.id) for row in rows] == [(i, f"test/{i}") for i in (1, 2, 4, 5, 7, 8)]
    assert sorted(source.bad_rows) == [0, 3, 6]
    # those of one id, which a user's environment that makes rows on access may have; `fovea eval` refuses them
    tasks = [replace(task, id="same") for task in BanditEnvironment().tasks("test")]
    assert [row.index for row in wait_for(begun.evaluator.answers(source_of(tasks)))] == list(range(16))


def test_the_majority_is_by_kind() -> None:
    """Even rows are of kind 0, where b is made the most frequent; kinds unknown to training get the overall one."""
    environment = BanditEnvironment()
    train = [
        Task(id=f"{kind}/{index}", question=answer, answer=answer, kind=kind)
        for kind, of_kind in {"kind 0": "bba", "kind 1": "cccd"}.items()
        for index, answer in enumerate(of_kind)
    ]
    say = majority_answers(environment, train)
    test = environment.tasks("test")
    assert (say(test[0]), say(test[1])) == ("b", "c")
    assert say(Task(id="x", question="a", answer="a", kind="new")) == "c"
    found = wait_for(baseline_answers(environment, graded(environment), source_of(), None, say))
    # test rows ask a b c d in turn, the kinds 0 1 0 1: b stands at odd rows only, c at even ones
    assert {row.index for row in found if row.answers[0].accuracy == 1} == set()
    with pytest.raises(DataError, match="no training row can be read"):
        majority_answers(environment, Gaps(train[:1]))


def test_gold_answers_are_right_and_bad_rows_are_counted() -> None:
    environment = BanditEnvironment()
    source = source_of(Gaps(environment.tasks("test")))
    found = wait_for(baseline_answers(environment, graded(environment), source, 9, environment.target))
    assert sorted(row.index for row in found) == [1, 2, 4, 5, 7, 8]
    assert {row.answers[0].accuracy for row in found} == {1.0}
    assert source.bad_rows[3] == "row 3 is empty"


def evaluator_of(
    scores: BanditEnvironment, on_unscored: Callable[[str], None] = lambda _: None, engine: BanditEngine | None = None
) -> Evaluator:
    """An evaluator of an engine that answers c to everything, scored by another environment."""
    engine = engine or BanditEngine()
    engine.table, engine.version = np.array([[0.0, 0.0, 9.0, 0.0]] * 4), 0
    greedy = Sampling(max_new_tokens=1, temperature=0.0)
    model = EngineAnswers(engine, BanditEnvironment(), graded(scores))
    return Evaluator(model, greedy=greedy, batch_size=3, on_unscored=on_unscored)


def test_an_engines_images_are_forgotten_after_every_chunk() -> None:
    class Remote(BanditEngine):
        forgotten = 0

        def forget_images(self) -> None:
            self.forgotten += 1

    engine = Remote()
    wait_for(evaluator_of(BanditEnvironment(), engine=engine).answers(source_of(), 10))
    assert engine.forgotten == 4, "10 rows by 3"


def waiting(*, breaks: bool = False) -> Grading:
    """Scores four answers at once, and waits until there are four."""
    barrier = threading.Barrier(4)

    def score(task: Task, turns: Sequence[Turn]) -> Score:
        barrier.wait(timeout=20)
        if breaks:
            raise RuntimeError("away")
        return BanditEnvironment().score(task, turns)

    limits = CallLimits(name="waits", calls_at_once=4, timeout_seconds=30)
    return Grading(graders=(UserGrader(score, CallThreads("waits")),), calls=LimitedCalls(limits))


def test_a_baseline_is_scored_by_as_many_calls_as_a_rollout() -> None:
    environment = BanditEnvironment()
    found = wait_for(baseline_answers(environment, waiting(), source_of(), 8, environment.target))
    assert [row.index for row in found] == list(range(8))
    with pytest.raises(ScoreError, match=r"^test/0: waits raised RuntimeError: away"):
        wait_for(baseline_answers(environment, waiting(breaks=True), source_of(), 4, environment.target))


class Unscored(BanditEnvironment):
    """Gives no score to tasks whose ids end so."""

    def __init__(self, end: str) -> None:
        self._end = end

    def score(self, task: Task, turns: Sequence[Turn]) -> Score:
        if task.id.endswith(self._end):
            raise UnscoredError("away")
        return super().score(task, turns)


def test_rows_without_a_score_are_left_out_and_counted() -> None:

    noted: list[str] = []
    evaluator, source = evaluator_of(Unscored("3"), noted.append), source_of()
    evaluation = wait_for(evaluator.evaluate(source, 10))
    assert (evaluation.num_rows, evaluation.num_unscored) == (9, 1)
    assert noted == ["test/3: away"]
    kept = wait_for(evaluator.answers(source, 10, unscored=[]))
    assert [row.index for row in kept] == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    assert evaluation.accuracy == sum(row.answers[0].accuracy for row in kept) / 9
    with pytest.raises(UnscoredError, match=r"^test/3: away"):
        wait_for(evaluator.answers(source, 10))
    # an evaluation in which nothing is scored
    with pytest.raises(ScoreError, match=r"none of the 10 held-out rows could be scored; the last one: test/9: away"):
        wait_for(evaluator_of(Unscored("")).evaluate(source_of(), 10))
