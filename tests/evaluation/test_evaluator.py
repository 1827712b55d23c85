"""Answers of an engine to every row of a source, their figures, and rows that a judge fails to score."""

from __future__ import annotations

import json
import math
import re
import statistics
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner, Result

from fovea.cli.main import app
from fovea.config.run import Config
from fovea.data.prompt_source import PromptSource
from fovea.evaluation.baselines import baseline_answers, majority_answers
from fovea.evaluation.evaluator import EngineAnswers, Evaluator
from fovea.evaluation.statistics import dev_metrics, figures_of, mean_text, percent_text, shown_once
from fovea.loop import train
from fovea.metrics.log import read_metrics
from fovea.metrics.names import undefined
from fovea.report.summary import read_summary
from fovea.report.tables import tables_of
from fovea.run.context import Run
from fovea.run.lifecycle import begin
from fovea.types import Evaluation, Sampling
from fovea.wiring.run import build
from fovea_gym.benchmarks.estimates import mean_estimate, share_estimate
from fovea_gym.environments.custom.grader import UserGrader
from fovea_gym.environments.geospot.gazetteer import LatLon
from fovea_gym.environments.geospot.parsing import parse_answer
from fovea_gym.environments.geospot.reward import KnownPlace, distance_parts
from fovea_gym.errors import ConfigError, DataError, ScoreError, UnscoredError
from fovea_gym.graders.grading import CallLimits, CallThreads, Grading, LimitedCalls
from fovea_gym.types import Score, Task, Turn
from fovea_gym.utils.event_loop import wait_for
from gym_tests.bandit import BanditEnvironment, graded
from gym_tests.chat_server import Endpoint, says
from gym_tests.environments.files import files, row
from gym_tests.tables import table
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


def test_baselines_answer_with_the_majority_of_a_kind_and_with_the_truth() -> None:
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
    # gold answers are right, and bad rows are counted
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


PARIS = LatLon(48.8566, 2.3522)
TOLERANCES_KM = (500.0, 200.0, 100.0, 50.0, 25.0)


class Kilometres(BanditEnvironment):
    """Half of the answers have a distance, one thousand times the task's number; images are photos or maps in turn."""

    def tasks(self, split: str) -> list[Task]:
        tasks = enumerate(super().tasks(split))
        return [replace(task, row={"image": ("photo", "map")[n % 2]}) for n, task in tasks]

    def score(self, task: Task, turns: Sequence[Turn]) -> Score:
        right, number = float(turns[-1].text == task.answer), int(task.id.partition("/")[2])
        parts = {"country": right} | ({"distance_km": 1000.0 * number} if number % 2 else {})
        return Score(reward=right / 2 + 0.25, accuracy=right, parts=parts)


def evaluation_of(key: str | None = "image", rows: list[Any] | None = None) -> Evaluation:
    environment, engine = Kilometres(), BanditEngine()
    engine.table, engine.version = np.zeros((4, 4)), 0
    answers = EngineAnswers(engine, environment, graded(environment))
    greedy = Sampling(max_new_tokens=1, temperature=0.0)
    evaluator = Evaluator(answers, greedy=greedy, batch_size=3, image_type_key=key)
    limits: Any = {"max_prompt_tokens": 10, "on_bad_row": "error", "cache_gib": 0.0}
    source = PromptSource(environment.tasks("dev"), environment, BanditRenderer(), **limits)
    return wait_for(evaluator.evaluate(source, None, (rows if rows is not None else []).extend))


def test_an_evaluation_keeps_rewards_parts_and_image_types() -> None:
    """The greedy answer of a table of zeros is `a`, right for every fourth row, all of them photos."""
    rows: list[Any] = []
    figures = figures_of(evaluation_of(rows=rows))
    assert (figures.accuracy.mean, figures.accuracy.n) == (0.25, 16)
    by_image_type = {name: (value.mean, value.n) for name, value in figures.by_image_type.items()}
    assert by_image_type == {"map": (0.0, 8), "photo": (0.5, 8)}
    assert figures.reward.mean == 0.375  # type: ignore[union-attr]
    parts = {name: (part.mean, part.n) for name, part in figures.parts.items()}
    assert parts == {"country": (0.25, 16), "distance_km": (8000.0, 8)}
    assert [(row.id, row.truth, row.image_type) for row in rows[:2]] == [("dev/0", "a", "photo"), ("dev/1", "b", "map")]
    with pytest.raises(ConfigError, match=r"evaluate.image_type_key=kind, but dev/0 has no such key, only image"):
        evaluation_of(key="kind")


def test_dev_metrics_hold_every_figure_with_its_interval() -> None:
    metrics = dev_metrics(evaluation_of())
    read = ("accuracy/dev", "dev/reward", "dev/reward/distance_km", "dev/accuracy/photo")
    assert [metrics[name] for name in read] == [0.25, 0.375, 8000, 0.5]
    for name in ("accuracy", "reward", "reward/country", "reward/distance_km", "accuracy/photo"):
        value = metrics["accuracy/dev" if name == "accuracy" else f"dev/{name}"]
        assert metrics[f"dev_low/{name}"] < value < metrics[f"dev_high/{name}"]
    assert undefined(metrics) == []


def test_intervals_are_wilsons_for_shares_and_normal_for_means() -> None:
    share = mean_estimate([1.0] * 3 + [0.0] * 7)
    # R: binom::binom.wilson(3, 10)
    assert (share.low, share.high) == pytest.approx((0.1077913, 0.6032219), abs=1e-6)
    values = [0.5, 120.0, 3.0, 80.0]
    mean = mean_estimate(values)
    normal = statistics.NormalDist(statistics.mean(values), statistics.stdev(values) / 2)
    assert (mean.low, mean.high) == pytest.approx((normal.inv_cdf(0.025), normal.inv_cdf(0.975)), rel=1e-6)
    assert math.isnan(mean_estimate([0.5]).low)


@table(
    ("text", "parts"),
    [
        ("Latitude: 48.8566\nLongitude: 2.3522", {"distance_km": 0.0} | dict.fromkeys("01234", 1.0)),
        # Lyon, some 392 km away
        ("Latitude: 45.7640\nLongitude: 4.8357", {"distance_km": 391.5, "0": 1.0} | dict.fromkeys("1234", 0.0)),
        ("Country: France", dict.fromkeys("01234", 0.0)),
    ],
)
def test_kilometres_by_each_stages_tolerance(text: str, parts: Mapping[str, float]) -> None:
    named = {f"within_{TOLERANCES_KM[int(key)]:g}_km" if key.isdecimal() else key: x for key, x in parts.items()}
    found = distance_parts(parse_answer(text), KnownPlace(country="FR", at=PARIS), TOLERANCES_KM)
    assert found == pytest.approx(named, abs=1.0)
    assert distance_parts(parse_answer(text), KnownPlace(country="FR"), TOLERANCES_KM) == {}


def test_a_run_keeps_its_answers_and_its_figures(tmp_path: Path) -> None:
    evaluate = {"every_steps": 5, "dev_size": 4, "test_size": 6, "image_controls": False, "shared_images": "ignore"}
    train(bandit_run(tmp_path, max_steps=10, evaluate=evaluate))
    names = sorted(path.stem for path in (tmp_path / "answers").iterdir())
    assert names == ["dev-step-000005", "dev-step-000010", "test-before", "test-final"]
    lines = [json.loads(line) for line in (tmp_path / "answers" / "dev-step-000010.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines] == ["dev/0", "dev/1", "dev/2", "dev/3"]
    assert lines[1].keys() >= {"answers", "truth", "kind"}
    (reading,) = [row for row in read_metrics(tmp_path) if row["step"] == 10]
    assert reading["accuracy/dev"] == reading["dev/reward"] == sum(line["answers"][0]["reward"] for line in lines) / 4
    test = read_summary(tmp_path / "summary.json")["test"]
    assert test["before"].accuracy.n == test["final"].parts["answer"].n == 6  # type: ignore[union-attr]
    assert test["final"].reward.low <= test["final"].reward.mean  # type: ignore[union-attr]


def test_the_first_table_can_be_left_out(tmp_path: Path) -> None:
    run = bandit_run(tmp_path, max_steps=1, evaluate={"before_training": False, "shared_images": "ignore"})
    assert wait_for(begin(run)).before is None
    assert not (tmp_path / "answers").exists()


def test_test_rows_are_read_by_no_reading_that_steers(tmp_path: Path) -> None:
    """With the tables off, a run to its last step asks only for dev rows."""
    evaluate = {"every_steps": 1, "before_training": False, "shared_images": "ignore", "image_controls": False}
    run = bandit_run(tmp_path, max_steps=4, evaluate=evaluate)
    opened: list[str] = []
    prompt = run.environment.prompt
    run.environment.prompt = lambda task: opened.append(task.id.partition("/")[0]) or prompt(task)  # type: ignore[method-assign,func-returns-value]
    final: list[int] = []
    evaluate = run.evaluator.evaluate

    async def noted(source: PromptSource, *limits: Any) -> Evaluation:
        if source is run.sources.test:
            final.append(len(opened))
        return await evaluate(source, *limits)

    run.evaluator.evaluate = noted  # type: ignore[method-assign]
    train(run)
    (before_the_table,) = final
    assert set(opened[:before_the_table]) == {"train", "dev"}


def test_summary_tables_fit_80_columns(tmp_path: Path) -> None:
    summary = train(bandit_run(tmp_path, max_steps=2, evaluate={"shared_images": "ignore", "image_controls": False}))
    console = Console(width=80, record=True, quiet=False, file=(tmp_path / "out").open("w"))
    for each in tables_of(summary):
        console.print(each)
    text = console.export_text()
    assert "Reward and its parts" in text
    assert "…" not in text


def test_a_tie_is_rounded_up_in_every_unit() -> None:
    for share, n, text in ((266 / 800, 800, "33.3"), (9 / 16, 16, "56.3")):
        estimate = share_estimate(share, n)
        texts = percent_text(estimate).split()[0], mean_text(estimate).split()[0]
        assert texts == (text, f"0.{text.replace('.', '')}")


def test_a_figure_that_repeats_an_earlier_one_shares_its_label() -> None:
    before = {"reward": 0.25, "answer": 0.25, "form": 0.5}
    final = {"reward": 0.75, "answer": 0.75, "form": 0.75, "seen": 0.75}
    assert shown_once([before, final]) == {"reward": "reward, answer", "form": "form", "seen": "seen"}
    assert shown_once([final]) == {"reward": "reward, answer, form, seen"}
    assert shown_once([{}]) == {}


ROWS = [row("Describe it.", f"A square, number {number}.", "red") for number in range(6)]


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    served = Endpoint((400, b"refused"), says("Score: 10"))
    yield served
    served.server.shutdown()
    served.server.server_close()


def evaluated(folder: Path, endpoint: Endpoint, on_failure: str) -> Result:
    judge = {"url": endpoint.url, "model": "m", "max_concurrency": 1, "on_failure": on_failure}
    environment = {"name": "caption", "metric_weights": {"judge": 1}, **files(folder, ROWS)}
    plain = json.loads(json.dumps(environment))
    (folder / "recipe.yaml").write_text(yaml.safe_dump({"model": {"tiny": {}}, "environment": plain, "judge": judge}))
    words = ["eval", "gold", "constant:x", "--recipe", str(folder / "recipe.yaml"), "--json", str(folder / "eval.json")]
    return CliRunner().invoke(app, words, env={"COLUMNS": "400"})


def test_a_failed_call_leaves_its_row_out_and_is_counted(tmp_path: Path, endpoint: Endpoint) -> None:
    done = evaluated(tmp_path, endpoint, "drop")
    assert done.exit_code == 0, done.output
    assert re.search(r"gold: not scored, left out: test/\d: the judge at .* gave no score: status 400", done.output)
    assert "not scored" in done.output
    content = json.loads((tmp_path / "eval.json").read_text())
    assert [len(reasons) for reasons in content["unscored"].values()] == [1, 0]
    gold, constant = content["targets"]
    assert (gold["rows_unscored"], constant["rows_unscored"]) == (1, 0)
    # the row is left out for both, so that they are compared on the same rows
    assert [(each["accuracy"]["n"], each["accuracy"]["mean"]) for each in (gold, constant)] == [(5, 1.0), (5, 1.0)]


def test_a_failed_call_is_an_error_by_default(tmp_path: Path, endpoint: Endpoint) -> None:
    failed = evaluated(tmp_path, endpoint, "error")
    assert failed.exit_code == 2, failed.output
    assert failed.stderr.strip().endswith("fix it, or set judge.on_failure=drop to leave such groups out")


def test_a_run_leaves_the_row_out_of_its_readings(tmp_path: Path, endpoint: Endpoint) -> None:
    """The first call is about a test row, before training; the judge is a part of another environment's reward."""
    judge = {"url": endpoint.url, "model": "m", "max_concurrency": 1, "on_failure": "drop"}
    settings: dict[str, Any] = {
        **{"run_dir": str(tmp_path / "run"), "max_steps": 1, "parity": {"prompts": 0}},
        "model": {"tiny": {"hidden_size": 32, "num_layers": 1, "vocabulary_size": 300}},
        "environment": {"name": "shapes", "train_size": 8, "dev_size": 2, "test_size": 4},
        **{"model_reward": {"judge": 0.5}, "judge": judge},
        "rollout": {"prompts_per_step": 2, "samples_per_prompt": 2, "max_new_tokens": 4},
        "evaluate": {"image_controls": False, "shared_images": "ignore"},
        "log": {"tensorboard": False, "progress": False},
    }
    summary = train(build(Config.model_validate(settings)))
    assert summary.before is not None
    assert (summary.before.num_rows, summary.before.num_unscored) == (3, 1)
    assert (summary.final.num_rows, summary.final.num_unscored) == (4, 0)
    (row_of_step,) = read_metrics(tmp_path / "run")
    assert (row_of_step["reward/judge"], row_of_step["groups/unscored"]) == (1.0, 0.0)
    assert not list(undefined(row_of_step))
    (listed,) = (tmp_path / "run" / "unscored.jsonl").read_text().splitlines()
    assert json.loads(listed)["step"] is None
