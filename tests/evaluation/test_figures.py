"""Figures of an evaluation: rewards, parts and image types with intervals, in a run's files and metrics."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from fovea.data.prompt_source import PromptSource
from fovea.evaluation.evaluator import EngineAnswers, Evaluator
from fovea.evaluation.statistics import dev_metrics, figures_of, mean_text, percent_text, shown_once
from fovea.loop import train
from fovea.metrics.log import read_metrics
from fovea.metrics.names import undefined
from fovea.report.summary import read_summary
from fovea.report.tables import tables_of
from fovea.run.lifecycle import begin
from fovea.types import Evaluation, Sampling
from fovea_gym.benchmarks.estimates import mean_estimate, share_estimate
from fovea_gym.environments.geospot.gazetteer import LatLon
from fovea_gym.environments.geospot.parsing import parse_answer
from fovea_gym.environments.geospot.reward import KnownPlace, distance_parts
from fovea_gym.errors import ConfigError
from fovea_gym.types import Score, Task, Turn
from fovea_gym.utils.event_loop import wait_for
from gym_tests.bandit import BanditEnvironment, graded
from gym_tests.tables import table
from tests.fakes import BanditEngine, BanditRenderer, bandit_run

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
    answers, greedy = (
        EngineAnswers(engine, environment, graded(environment)),
        Sampling(max_new_tokens=1, temperature=0.0),
    )
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
