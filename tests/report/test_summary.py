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


def evaluation(**correct_of: tuple[int, int]) -> Evaluation:
    return Evaluation(
        accuracies={kind: (1.0,) * right + (0.0,) * (n - right) for kind, (right, n) in correct_of.items()}
    )


SUMMARY = Summary(
    before=evaluation(count=(0, 10), colour=(1, 10)),
    warmup=evaluation(count=(4, 10), colour=(6, 10)),
    final=evaluation(count=(8, 10), colour=(10, 10)),
    shuffled_images=evaluation(count=(3, 10), colour=(4, 10)),
    blank_images=evaluation(count=(2, 10), colour=(3, 10)),
    duplicates_across_splits=0,
    duplicates_searched_frac=0.5,
    warmup_seconds=20.5,
    rl_seconds=100.0,
    total_seconds=130.25,
    steps=1200,
    seed=3,
)
RL_ONLY = replace(SUMMARY, before=None, warmup=None, shuffled_images=None, blank_images=None)


def shown(summary: Summary, width: int = 100) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    for table in (summary_table(summary), controls_table(summary)):
        console.print(table or "")
    return console.export_text()


def test_types_that_were_not_shuffled_do_not_count_beside_those_that_were() -> None:
    assert replace(SUMMARY, shuffled_images=evaluation(count=(3, 10))).to_json().get("same_kinds") == 0.8


def test_json_has_the_agreed_shape() -> None:
    figures = SUMMARY.to_json()
    test = figures.pop("test")
    assert test["final"].accuracy.mean == test["before"].accuracy.mean + 0.85 == 0.9  # type: ignore[union-attr]
    assert test["warmup"].by_type["colour"].n == 10  # type: ignore[union-attr]
    assert figures == {
        "accuracy": {"before": 0.05, "warmup": 0.5, "final": 0.9},
        "by_type": {
            "count": {"warmup": 0.4, "final": 0.8, "n": 10},
            "colour": {"warmup": 0.6, "final": 1.0, "n": 10},
        },
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
    assert figures["shuffled_images"] is figures["blank_images"] is None
    assert figures["duplicates_across_splits"] is None


@pytest.mark.parametrize("summary", [SUMMARY, RL_ONLY])
def test_the_file_reads_back(tmp_path: Path, summary: Summary) -> None:
    path = tmp_path / "summary.json"
    write_summary(path, summary)
    assert read_summary(path) == summary.to_json()
    final = json.loads(path.read_text())["test"]["final"]
    assert (final["accuracy"]["mean"], final["by_type"]["count"]["n"]) == (0.9, 10)


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_summary(path, SUMMARY)
    path.write_text(path.read_text().replace("0.05", '"high"'))
    with pytest.raises(DataError, match=r"summary\.json is not a summary \(accuracy\.before: .*; delete the file"):
        read_summary(path)


@pytest.mark.parametrize(
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


def test_the_caption_says_what_the_controls_mean() -> None:
    text = " ".join(shown(SUMMARY).split())
    assert "Test images found in the training split: 0 (looked for in 50 % of its rows)." in text
    assert "Both show the accuracy without the picture." in text
    assert "text alone" not in shown(RL_ONLY)


def test_the_table_fits_80_columns() -> None:
    assert "…" not in shown(SUMMARY, width=80)
    assert len([line for line in shown(SUMMARY, width=80).splitlines() if "│" in line]) == 6


def test_stages_that_did_not_run_have_no_column() -> None:
    assert "before" not in shown(RL_ONLY)
    assert "warm-up" not in shown(replace(RL_ONLY, before=SUMMARY.before))
    assert "before RL" in shown(replace(RL_ONLY, before=SUMMARY.before))


def test_rows_without_types_are_shown_once() -> None:
    rows = shown(replace(RL_ONLY, final=evaluation(all=(8, 10)))).count("80.0")  # and no table of controls
    assert rows == 1


def test_a_type_name_is_text_not_markup() -> None:
    final = Evaluation(accuracies={"[red]x[/blue]": (1.0,), "y": (0.0,)})
    assert "[red]x[/blue]" in shown(replace(RL_ONLY, final=final))


def test_the_image_ablation_names_the_controls_that_were_run() -> None:
    both = controls_table(SUMMARY)
    only = controls_table(replace(SUMMARY, shuffled_images=None))
    assert both is not None
    assert only is not None
    assert str(both.title) == "Image ablation (shuffled, blank), after RL"
    assert str(both.caption).endswith(
        "blank: each question with grey images. Both show the accuracy without the picture."
    )
    assert str(only.title) == "Image ablation (blank), after RL"
    assert str(only.caption) == "Blank: each question with grey images. It shows the accuracy without the picture."
