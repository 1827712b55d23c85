from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from fovea.report.summary import Summary, read_summary, write_summary
from fovea.report.tables import controls_table, summary_table
from fovea.types import Evaluation
from fovea_gym.benchmarks.estimates import wilson_interval
from fovea_gym.errors import DataError
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


def test_types_that_were_not_shuffled_do_not_count_beside_those_that_were() -> None:
    assert replace(SUMMARY, shuffled_images=evaluation_of(count=(3, 10))).to_json().get("same_kinds") == 0.8


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


def test_stages_that_did_not_run_are_null() -> None:
    figures = replace(RL_ONLY, duplicates_across_splits=None).to_json()
    assert figures["accuracy"] == {"before": None, "warmup": None, "final": 0.9}
    assert figures["by_type"]["count"] == {"warmup": None, "final": 0.8, "n": 10}
    assert figures["shuffled_images"] is figures["blank_images"] is figures["duplicates_across_splits"] is None


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


@table(
    ("right", "n", "low", "high"),
    [
        # z^2 = 3.841459; 8 of 10: centre (0.8 + 0.1920729) / 1.3841459 = 0.7167401,
        # half 1.959964 sqrt(0.016 + 0.0096036) / 1.3841459 = 0.2265762
        (8, 10, 0.490164, 0.943316),
        # 0 of 10: centre = half = 0.1920729 / 1.3841459
        (0, 10, 0.0, 0.277533),
        (10, 10, 0.722467, 1.0),
    ],
)
def test_wilson_by_hand(right: int, n: int, low: float, high: float) -> None:
    assert wilson_interval(right / n, n) == pytest.approx((low, high), abs=2e-6)


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
