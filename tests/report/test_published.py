"""The published result of a run's folder on its page: figures, verdict, and a damaged file."""

from __future__ import annotations

from pathlib import Path

import pytest

from fovea.commands.benchmarks import BENCHMARKS
from fovea.config.recipes import shipped_recipes
from fovea.evaluation.statistics import Figures, percent_text
from fovea.report.figures import RunSummary
from fovea.report.published import PUBLISHED_FILE, PublishedJson, with_published, write_published
from fovea.report.summary import SummaryJson
from fovea_gym.benchmarks.estimates import Estimate
from fovea_gym.errors import DataError
from fovea_tools.published.catalogue import find_result, published_results
from fovea_tools.published.reproduce import published_json
from gym_tests.tables import table

RESULT = find_result("r1v_clevr_2b")
RECIPES = [shipped_recipes()[name] for name in RESULT.recipes]
PUBLISHED: PublishedJson = published_json(RESULT, RECIPES, [])


def summary(mean: float, low: float, high: float) -> SummaryJson:
    """The summary of a run that ended with this accuracy."""
    accuracy = Estimate(mean=mean, low=low, high=high, n=200)
    final = Figures(accuracy=accuracy, by_type={}, by_image_type={}, reward=None, parts={})
    return {"test": {"before": None, "warmup": None, "final": final}}  # type: ignore[typeddict-item]


@table(
    ("changed", "ended", "verdict"),
    [
        ({}, (0.8, 0.75, 0.85), "is inside this run's 95 % interval"),
        ({}, (0.6, 0.55, 0.65), "is outside this run's 95 % interval"),
        ({"same_rows": False}, (0.8, 0.75, 0.85), "is on other rows (200 counting questions of SuperCLEVR, greedy)"),
        ({"after": None}, (0.8, 0.75, 0.85), "There is no published figure"),
        ({}, None, "has not been evaluated on its test rows"),
    ],
)
def test_the_verdict(
    changed: dict[str, object], ended: tuple[float, float, float] | None, verdict: str, tmp_path: Path
) -> None:
    write_published(tmp_path, {**PUBLISHED, **changed})  # type: ignore[typeddict-item]
    shown = with_published(RunSummary(), summary(*ended) if ended else None, tmp_path)
    assert verdict in shown.notes[1]
    figures, settings = shown.tables
    mine = Estimate(mean=ended[0], low=ended[1], high=ended[2], n=200) if ended else None
    assert figures.rows[-1].texts[0] == ("" if "after" in changed else "82.5")
    assert figures.rows[-1].texts[1] == percent_text(mine)
    assert {row.name for row in settings.rows} >= {'lr_scheduler_type="linear"'}


@table(
    ("name", "command"),
    [
        ("thinklite_7b", "On mathvista: `fovea eval 'runs/my run' bench=mathvista`."),
        ("mm_eureka_7b", "On mathvista: `fovea eval 'runs/my run' bench=mathvista`."),
        ("r1v_clevr_2b", ""),
    ],
)
def test_a_figure_on_a_benchmark_names_the_command_that_measures_it(name: str, command: str, in_tmp_path: None) -> None:
    folder, result = Path("runs/my run"), find_result(name)
    folder.mkdir(parents=True, exist_ok=True)
    write_published(folder, published_json(result, [shipped_recipes()[each] for each in result.recipes], []))
    verdict = with_published(RunSummary(), summary(0.8, 0.75, 0.85), folder).notes[1]
    assert verdict.endswith(command)
    assert ("bench=" in verdict) == bool(command)


def test_the_benchmarks_of_figures_are_known_and_other_test_rows_are_not_compared() -> None:
    assert {result.figure.bench for result in published_results().values()} <= {"", *BENCHMARKS}
    assert PUBLISHED["same_rows"]
    assert not published_json(RESULT, RECIPES, ["evaluate.test_size=50"])["same_rows"]
    assert published_json(RESULT, RECIPES, ["seed=7", "run_dir=x"])["same_rows"]


def test_a_run_without_one_and_a_damaged_file(tmp_path: Path) -> None:
    assert with_published(RunSummary(), None, tmp_path) == RunSummary()
    (tmp_path / PUBLISHED_FILE).write_text('{"title": 3}', encoding="utf-8")
    told = r"published\.json is not a published result \(.*; delete the file, and the page leaves it out"
    with pytest.raises(DataError, match=told):
        with_published(RunSummary(), None, tmp_path)
