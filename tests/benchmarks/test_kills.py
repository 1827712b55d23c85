"""Runs that are killed again and again equal runs that are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.kills import CASES, SIZES, main, metric_differences, moments
from fovea.config.loading import load_config
from fovea.metrics.log import JsonlSink

TINY = ("warmup=null", "parity.prompts=0", "evaluate.before_training=false", "evaluate.shared_images=ignore")


def test_moments_are_seeded_and_come_in_the_order_of_their_steps() -> None:
    made = [moments(20, seed=seed, steps=30, step_seconds=0.5, start_seconds=4.0, ranks=2) for seed in (0, 0, 1)]
    assert made[0] == made[1] != made[2]
    steps = [moment.step for moment in made[0] if moment.step is not None]
    assert steps == sorted(steps)
    assert 0 < len(steps) < 20 == len(made[0]), "some while it starts"
    assert {moment.rank for moment in made[0]} == {0, 1}


@pytest.mark.parametrize(
    ("metrics", "found"),
    [
        ({"loss": 0.5, "reward": float("nan"), "seconds/step": 9.0}, []),
        ({"loss": 0.50001, "reward": float("nan")}, ["step 1: loss: 0.5 and 0.50001"]),
        ({"loss": 0.5}, ["step 1: reward: nan and None"]),
    ],
)
def test_differences_are_named(metrics: dict[str, float], found: list[str], tmp_path: Path) -> None:
    rows = {"one": {"loss": 0.5, "reward": float("nan"), "seconds/step": 1.0}, "two": metrics}
    for name, row in rows.items():
        (tmp_path / name).mkdir()
        sink = JsonlSink(tmp_path / name)
        sink.write(1, row)
        sink.close()
    assert metric_differences(tmp_path / "one", tmp_path / "two") == found


@pytest.mark.parametrize("case", CASES)
def test_the_settings_of_every_case_are_valid(case: str) -> None:
    recipe, *of_case = CASES[case]
    load_config([Path(recipe)], [*SIZES, *of_case])


@pytest.mark.slow
@pytest.mark.kill
@pytest.mark.long
@pytest.mark.parametrize(("processes", "kills", "steps"), [(1, 3, 8), (2, 2, 6)])
def test_a_killed_run_equals_one_never_killed(processes: int, kills: int, steps: int, tmp_path: Path) -> None:
    options = [f"--kills={kills}", f"--processes={processes}", f"--steps={steps}", f"--out={tmp_path / 'runs'}"]
    with pytest.raises(SystemExit) as ended:
        main([*options, *TINY])
    assert ended.value.code == 0
