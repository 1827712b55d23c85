"""Stages by step and by success, what is logged, what a checkpoint brings back, and rows by level."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from fovea.config.curriculum import Curriculum
from fovea.data.curriculum import CurriculumProgress
from fovea.data.order import Order
from fovea.loop import train
from fovea.metrics.log import read_metrics
from fovea_gym.environments.geospot.environment import GeoSpot
from fovea_gym.environments.stages import Stages
from fovea_gym.environments.stages import stages_of as stages_of_environment
from fovea_gym.errors import ConfigError, DataError
from fovea_gym.rows.access import RowAccess
from fovea_gym.rows.tasks import LazyTasks, levels_of
from fovea_gym.settings import environments as config
from gym_tests.bandit import BanditEnvironment
from gym_tests.tables import table
from tests.fakes import STAGES, bandit_run, staged_run


def stages_of(curriculum: CurriculumProgress, steps: Sequence[int]) -> list[int]:
    stages = []
    for step in steps:
        curriculum.begin_step(step)
        stages.append(curriculum.stage)
    return stages


def geospot() -> Stages:
    return stages_of_environment(GeoSpot(config.GeoSpotEnvironment(train_files=("a",), test_files=("b",)), RowAccess()))


def test_geospot_goes_through_its_stages_by_step() -> None:
    curriculum = CurriculumProgress(geospot())
    steps = (0, 99, 100, 299, 300, 599, 600, 999, 1000, 10**6)
    assert len(geospot().stages) == 5
    assert stages_of(curriculum, steps) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert stages_of(CurriculumProgress(geospot(), Curriculum(enabled=False)), steps) == [4] * 10
    own = Curriculum(starts=(1, 2, 3, 4))
    assert stages_of(CurriculumProgress(geospot(), own), range(6)) == [0, 1, 2, 3, 4, 4]


def test_a_change_is_said_once_and_is_a_metric() -> None:
    curriculum = CurriculumProgress(geospot())
    said = {step: line for step in range(302) if (line := curriculum.begin_step(step)) is not None}
    assert said == {
        0: "stage 1 of 5, country: tolerance_km 500, weight_country 1",
        100: "stage 2 of 5, country refined: tolerance_km 200, weight_country 1",
        300: "stage 3 of 5, country and region: tolerance_km 100, weight_country 0.6, weight_region 0.4",
    }
    assert curriculum.metrics() == {
        "curriculum/stage": 3.0,
        "curriculum/tolerance_km": 100.0,
        "curriculum/weight_country": pytest.approx(0.6),
        "curriculum/weight_region": pytest.approx(0.4),
    }
    # an environment without stages has nothing to say
    curriculum = CurriculumProgress(stages_of_environment(BanditEnvironment()))
    assert (curriculum.begin_step(0), curriculum.stage, curriculum.metrics()) == (None, 0, {})


def test_by_success_a_stage_ends_when_its_own_window_is_good() -> None:
    settings = Curriculum(advance="success", success_rate=0.8, success_window_steps=3)
    curriculum = CurriculumProgress(STAGES, settings)
    stages = []
    for step, reward in enumerate([1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 1]):
        curriculum.begin_step(step)
        stages.append(curriculum.stage)
        curriculum.end_step(reward)
    assert stages == [0, 0, 0, 0, 0, 0, 1, 1, 1, 2, 2]
    # a checkpoint of more stages
    with pytest.raises(DataError, match=r"\bstage 5\b.*\b3\b"):
        CurriculumProgress(STAGES).restore({"stage": 4, "recent_rewards": []})


def test_the_loop_scores_by_stage_logs_it_and_evaluates_at_the_last(tmp_path: Path) -> None:
    summary = train(staged_run(tmp_path, max_steps=7))
    rows = read_metrics(tmp_path)
    assert [row["curriculum/stage"] for row in rows] == [1, 1, 2, 2, 2, 3, 3]
    pay = [1 / 3, 1 / 3, 2 / 3, 2 / 3, 2 / 3, 1, 1]
    assert [row["curriculum/pay"] for row in rows] == pytest.approx(pay)
    rewards = [share * row["accuracy"] for share, row in zip(pay, rows, strict=True)]
    assert [row["reward"] for row in rows] == pytest.approx(rewards)
    assert summary.final.num_rows == 16


def test_a_resumed_run_goes_on_in_its_stage(tmp_path: Path) -> None:
    by_success = {"advance": "success", "success_rate": 0.2, "success_window_steps": 4}
    settings = {"curriculum": by_success, "checkpoint": {"every_steps": 5}}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(staged_run(whole, max_steps=12, **settings))
    train(staged_run(parts, max_steps=5, **settings))
    train(staged_run(parts, resume=True, max_steps=12, **settings))
    expected, found = ([(row["curriculum/stage"], row["reward"]) for row in read_metrics(x)] for x in (whole, parts))
    assert found == expected
    assert len({stage for stage, _ in expected}) > 1


@table(
    ("stages", "settings", "message"),
    [
        (STAGES, {"starts": [5]}, r"\bcurriculum\.starts\b.*\b1\b.*\b3\b"),
        (STAGES, {"level_weights": [{}]}, r"\bcurriculum\.level_weights\b.*\b1\b.*\b3\b"),
        # as of geospot with your own reward, which scores all steps alike
        (None, {"starts": [5, 9]}, r"\bcurriculum\.starts=\[5, 9\]"),
        (None, {"advance": "success"}, r"\bcurriculum\.advance=success\b"),
    ],
)
def test_schedules_that_do_not_fit(stages: Stages | None, settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CurriculumProgress(stages, Curriculum.model_validate(settings))
    by_level = Curriculum(advance="success", level_weights=({"a": 1}, {"b": 1}))
    assert CurriculumProgress(None, by_level).stage == 0


class LevelledBandit(BanditEnvironment):
    """Every other row is hard."""

    def tasks(self, split: str) -> LazyTasks:  # type: ignore[override]
        tasks = super().tasks(split)
        return LazyTasks(
            tasks.__getitem__, range(16), kind_of=lambda i: tasks[i].kind, level_of=lambda i: ("easy", "hard")[i % 2]
        )


def test_rows_are_drawn_by_the_levels_of_the_stage(tmp_path: Path) -> None:
    """Hard rows have the answers b and d; the first stage never draws them, the second nothing else."""
    weights = [{"hard": 0}, {"easy": 0}]
    run = bandit_run(tmp_path, max_steps=4, curriculum={"starts": [2], "level_weights": weights})
    tasks = LevelledBandit().tasks("train")
    levels = levels_of(tasks)
    order = Order(tasks.kinds, weights={}, seed=0, levels=levels)
    object.__setattr__(run.stream, "order", order)
    drawn: list[list[str]] = []
    take = order.take
    order.take = lambda n: (rows := take(n), drawn.append([levels[row] for row in rows]))[0]  # type: ignore[method-assign, index]
    train(run)
    assert [set(step) for step in drawn] == [{"easy"}, {"easy"}, {"hard"}, {"hard"}]
    assert [row["curriculum/stage"] for row in read_metrics(tmp_path)] == [1, 1, 2, 2]


def test_level_weights_are_relative_to_the_share_of_rows() -> None:
    levels = ["easy", "hard", "hard", "hard"]
    order = Order(["all"] * 4, weights={}, seed=0, levels=levels)
    order.weigh_levels({"easy": 3})
    counts = Counter(levels[row] for row in order.take(4000))
    assert counts["easy"] == pytest.approx(2000, abs=150)
    order.weigh_levels({})
    assert Counter(levels[row] for row in order.take(4000))["easy"] == pytest.approx(1000, abs=150)


@table(
    ("levels", "weights", "message"),
    [
        (None, {"easy": 1}, r"\bcurriculum\.level_weights\b"),
        (["easy"], {"hard": 1}, r"\bcurriculum\.level_weights\b.*'hard'.*\beasy\b"),
        (["easy"], {"easy": 0}, "leaves no row to sample; give one of easy a weight"),
    ],
)
def test_level_weights_that_do_not_fit(levels: list[str] | None, weights: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Order(["all"], weights={}, seed=0, levels=levels).weigh_levels(weights)
