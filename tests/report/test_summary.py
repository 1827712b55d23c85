"""The summary of a run: its file, its tables in the console and on the page, and a published result beside it."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fovea.commands.benchmarks import BENCHMARKS
from fovea.config.recipes import shipped_recipes
from fovea.evaluation.statistics import Figures, percent_text
from fovea.metrics.log import JsonlSink, MetricsLog
from fovea.report.figures import RunSummary
from fovea.report.published import PUBLISHED_FILE, PublishedJson, with_published, write_published
from fovea.report.summary import Summary, SummaryJson, read_summary, write_summary
from fovea.report.tables import controls_table, summary_table
from fovea.report.viewed_run import ViewedRun
from fovea.types import Evaluation
from fovea_gym.benchmarks.estimates import Estimate
from fovea_gym.errors import DataError
from fovea_tools.published.catalogue import find_result, published_results
from fovea_tools.published.reproduce import published_json
from gym_tests.tables import table
from tests.report.folders import evaluation_of, summary_of

SUMMARY = summary_of(
    evaluation_of(count=(8, 10), colour=(10, 10)),
    **{"before": evaluation_of(count=(0, 10), colour=(1, 10)), "warmup": evaluation_of(count=(4, 10), colour=(6, 10))},
    shuffled_images=evaluation_of(count=(3, 10), colour=(4, 10)),
    blank_images=evaluation_of(count=(2, 10), colour=(3, 10)),
    **{"duplicates_across_splits": 0, "duplicates_searched_frac": 0.5, "steps": 1200, "seed": 3},
    **{"warmup_seconds": 20.5, "rl_seconds": 100.0, "total_seconds": 130.25},
)
RL_ONLY = replace(SUMMARY, before=None, warmup=None, shuffled_images=None, blank_images=None)


def shown(summary: Summary, width: int = 100) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    for each in (summary_table(summary), controls_table(summary)):
        console.print(each or "")
    return console.export_text()


def test_json_has_the_agreed_shape() -> None:
    figures = SUMMARY.to_json()
    test = figures.pop("test")
    assert test["final"].accuracy.mean == test["before"].accuracy.mean + 0.85 == 0.9  # type: ignore[union-attr]
    assert test["warmup"].by_type["colour"].n == 10  # type: ignore[union-attr]
    assert figures == {
        "accuracy": {"before": 0.05, "warmup": 0.5, "final": 0.9},
        "by_type": {"count": {"warmup": 0.4, "final": 0.8, "n": 10}, "colour": {"warmup": 0.6, "final": 1.0, "n": 10}},
        "shuffled_images": 0.35,
        "blank_images": 0.25,
        "same_kinds": 0.9,
        "duplicates_across_splits": 0,
        "duplicates_searched_frac": 0.5,
        "seconds": {"warmup": 20.5, "rl": 100.0, "total": 130.25},
        "steps": 1200,
        "seed": 3,
    }
    # stages that did not run
    figures = replace(RL_ONLY, duplicates_across_splits=None).to_json()
    assert figures["accuracy"] == {"before": None, "warmup": None, "final": 0.9}
    assert figures["by_type"]["count"] == {"warmup": None, "final": 0.8, "n": 10}
    assert figures["shuffled_images"] is figures["blank_images"] is figures["duplicates_across_splits"] is None
    # types that were not shuffled do not count beside those that were
    assert replace(SUMMARY, shuffled_images=evaluation_of(count=(3, 10))).to_json().get("same_kinds") == 0.8


def test_the_file_reads_back_and_a_broken_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    for summary in (RL_ONLY, SUMMARY):
        write_summary(path, summary)
        assert read_summary(path) == summary.to_json()
        final = json.loads(path.read_text())["test"]["final"]
        assert (final["accuracy"]["mean"], final["by_type"]["count"]["n"]) == (0.9, 10)
    path.write_text(path.read_text().replace("0.05", '"high"'))
    with pytest.raises(DataError, match=r"summary\.json is not a summary \(accuracy\.before: .*; delete the file"):
        read_summary(path)


def test_the_tables_have_a_row_for_each_type() -> None:
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown(SUMMARY).splitlines() if "│" in line]
    assert rows == [
        ["count", "0.0 [0, 28]", "40.0 [17, 69]", "80.0 [49, 94]", "10"],
        ["colour", "10.0 [2, 40]", "60.0 [31, 83]", "100.0 [72, 100]", "10"],
        ["all", "5.0 [0.9, 24]", "50.0 [30, 70]", "90.0 [70, 97]", "20"],
        ["count", "80.0 [49, 94]", "30.0 [11, 60]", "20.0 [6, 51]", "10"],
        ["colour", "100.0 [72, 100]", "40.0 [17, 69]", "30.0 [11, 60]", "10"],
        ["all", "90.0 [70, 97]", "35.0 [18, 57]", "25.0 [11, 47]", "20"],
    ]


def test_the_captions_say_what_the_controls_mean_and_name_those_that_were_run() -> None:
    text = " ".join(shown(SUMMARY).split())
    assert "Test images found in the training split: 0 (looked for in 50 % of its rows)." in text
    assert "Both show the accuracy without the picture." in text
    assert "text alone" not in shown(RL_ONLY)
    both, only = controls_table(SUMMARY), controls_table(replace(SUMMARY, shuffled_images=None))
    assert (str(both.title), str(only.title)) == (  # type: ignore[union-attr]
        "Image ablation (shuffled, blank), after RL",
        "Image ablation (blank), after RL",
    )
    blank, end = "lank: each question with grey images.", "the accuracy without the picture."
    assert str(both.caption).endswith(f"b{blank} Both show {end}")  # type: ignore[union-attr]
    assert str(only.caption) == f"B{blank} It shows {end}"  # type: ignore[union-attr]


def test_the_table_fits_80_columns_and_has_no_column_for_stages_that_did_not_run() -> None:
    narrow = shown(SUMMARY, width=80)
    assert ("…" in narrow, len([line for line in narrow.splitlines() if "│" in line])) == (False, 6)
    assert "before" not in shown(RL_ONLY)
    assert "warm-up" not in shown(replace(RL_ONLY, before=SUMMARY.before))
    assert "before RL" in shown(replace(RL_ONLY, before=SUMMARY.before))


def test_rows_without_types_are_shown_once_and_a_type_name_is_text_not_markup() -> None:
    rows = shown(replace(RL_ONLY, final=evaluation_of(all=(8, 10)))).count("80.0")  # and no table of controls
    assert rows == 1
    final = Evaluation(accuracies={"[red]x[/blue]": (1.0,), "y": (0.0,)})
    assert "[red]x[/blue]" in shown(replace(RL_ONLY, final=final))


ENDED = summary_of(
    evaluation_of(count=(8, 10), colour=(10, 10)),
    **{"before": evaluation_of(count=(0, 10), colour=(0, 10)), "warmup": evaluation_of(count=(4, 10), colour=(6, 10))},
    **{"shuffled_images": evaluation_of(count=(1, 3)), "duplicates_across_splits": 2, "steps": 1200, "seed": 3},
    **{"warmup_seconds": 20.5, "rl_seconds": 100.0, "total_seconds": 130.25},
)


def shown_of(folder: Path, summary: Summary) -> dict[str, Any]:
    write_summary(folder / "summary.json", summary)
    return ViewedRun(folder).summary()


def rows_of(table: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [(row["name"], *row["texts"], row["n"]) for row in table["rows"]]


def test_headline_types_and_notes(tmp_path: Path) -> None:
    shown = shown_of(tmp_path, ENDED)
    assert shown["line"] == "1,200 RL steps, seed 3; warm-up 20 s, RL 100 s, 130 s in total"
    assert [(each["label"], each["value"], each["note"]) for each in shown["headline"]] == [
        ("before warm-up", "0.0 %", "95 % interval [0, 16]"),
        ("after warm-up", "50.0 %", "95 % interval [30, 70]"),
        ("after RL", "90.0 %", "95 % interval [70, 97]"),
    ]
    (table,) = shown["tables"]
    assert table["columns"] == ("before warm-up", "after warm-up", "after RL")
    assert rows_of(table) == [
        ("count", "0.0 [0, 28]", "40.0 [17, 69]", "80.0 [49, 94]", 10),
        ("colour", "0.0 [0, 28]", "60.0 [31, 83]", "100.0 [72, 100]", 10),
        ("all", "0.0 [0, 16]", "50.0 [30, 70]", "90.0 [70, 97]", 20),
    ]
    low, mean, high = table["rows"][0]["bar"]
    assert (round(low, 3), mean, round(high, 3), table["rows"][0]["before"]) == (0.490, 0.8, 0.943, 0.4)
    assert shown["notes"] == (
        "The trained model gets 33.3 % right with another question's image, using only the text of the question.",
        "Test images found in the training split: 2.",
    )


def test_a_run_without_warmup_has_no_such_column_and_partial_credits_the_interval_of_a_mean(tmp_path: Path) -> None:
    """That of `estimate`, which test_statistics has by hand: 0.5 +- 0.299."""
    partial = summary_of(Evaluation(accuracies={"all": (0.2, 0.4, 0.6, 0.8)}))
    assert rows_of(shown_of(tmp_path, partial)["tables"][0]) == [("all", "50.0 [20, 80]", 4)]
    shown = shown_of(tmp_path, summary_of(evaluation_of(all=(1, 2)), before=ENDED.before))
    assert shown["tables"][0]["columns"] == ("before RL", "after RL")
    assert rows_of(shown["tables"][0]) == [("all", "0.0 [0, 16]", "50.0 [9, 91]", 2)]
    assert shown["notes"] == ()


def test_rewards_parts_and_image_types_have_intervals_and_equal_ones_stand_once(tmp_path: Path) -> None:
    parts = {"answer": (0.5,) * 10 + (1.0,) * 10, "form": (0.0, 1.0)}
    final = replace(ENDED.final, rewards=parts["answer"], parts=parts, by_image_type={"map": (1.0,)}, num_unscored=3)
    shown = shown_of(tmp_path, replace(ENDED, warmup=None, before=None, final=final))
    accuracies, rewards = shown["tables"]
    assert rows_of(accuracies)[-1] == ("images: map", "100.0 [21, 100]", 1)
    assert rows_of(rewards) == [("reward, answer", "0.75 [0.638, 0.862]", 20), ("form", "0.5 [0.0945, 0.905]", 2)]
    assert "Rows not scored and left out: 3 after RL." in shown["notes"]


def test_a_young_run_shows_its_reward_its_time_and_its_memory(tmp_path: Path) -> None:
    with MetricsLog([JsonlSink(tmp_path)]) as log:
        for step in range(1, 21):
            seconds = {"rollout": 0.25, "update": 0.5, "checkpoint": 9.0, "step": 1.0, "weight_sync": 0.125}
            others = {"reward": step / 100, "memory/peak_rss_gib": step / 10, "tokens_per_second": 7.0 * step}
            log.write(step, others | {f"seconds/{name}": value for name, value in seconds.items()})
    shown = ViewedRun(tmp_path).summary()
    assert [(each["label"], each["value"], each["note"]) for each in shown["headline"]] == [
        ("reward at the start", "0.015", "mean of 2 steps"),
        ("reward now", "0.195", "mean of 2 steps"),
    ]
    (time,) = shown["tables"]
    assert rows_of(time) == [
        ("update", "10.0", "500.0", "50.0 %", None),
        ("rollout", "5.0", "250.0", "25.0 %", None),
        ("weight_sync", "2.5", "125.0", "12.5 %", None),
        ("other", "2.5", "125.0", "12.5 %", None),
    ]
    machine = [(each["label"], each["value"]) for each in shown["machine"]]
    assert machine == [("peak memory", "2.00 GiB"), ("tokens/s", "136")]


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


def test_other_test_rows_are_not_compared_and_a_damaged_file_is_named(tmp_path: Path) -> None:
    assert {result.figure.bench for result in published_results().values()} <= {"", *BENCHMARKS}
    assert PUBLISHED["same_rows"]
    assert not published_json(RESULT, RECIPES, ["evaluate.test_size=50"])["same_rows"]
    assert published_json(RESULT, RECIPES, ["seed=7", "run_dir=x"])["same_rows"]
    assert with_published(RunSummary(), None, tmp_path) == RunSummary()
    (tmp_path / PUBLISHED_FILE).write_text('{"title": 3}', encoding="utf-8")
    told = r"published\.json is not a published result \(.*; delete the file, and the page leaves it out"
    with pytest.raises(DataError, match=told):
        with_published(RunSummary(), None, tmp_path)
