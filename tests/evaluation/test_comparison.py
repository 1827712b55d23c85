"""Metrics of several targets, from answers written by hand."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from fovea.evaluation.comparison import EvalResults, TargetAnswers, target_metrics
from fovea.evaluation.json_file import write_json
from fovea.evaluation.records import AnsweredRow, TaskRow
from fovea.evaluation.statistics import bootstrap_interval, mean_text, percent_text
from fovea.report.tables import tables
from fovea_gym.benchmarks.estimates import Estimate
from tests.records import said

KINDS = ["count", "colour", "count", "colour"]


def row(index: int) -> TaskRow:
    shown = {"question": "q", "truth": str(index), "image_type": "photo" if index < 3 else "drawing"}
    return TaskRow(id=f"test/{index}", index=index, kind=KINDS[index], **shown)


def answered(values: dict[int, float | Sequence[float]]) -> dict[str, AnsweredRow]:
    found = {}
    for index, value in values.items():
        several = value if isinstance(value, list | tuple) else [value]
        answers = tuple(said(f"{x:g}", reward=x, accuracy=x) for x in several)
        found[f"test/{index}"] = AnsweredRow(id=f"test/{index}", index=index, kind=KINDS[index], answers=answers)
    return found


def results() -> EvalResults:
    first = TargetAnswers(name="base", greedy=answered({0: 1, 1: 0, 2: 0, 3: 1}))
    second = TargetAnswers(
        name="trained",
        greedy=answered({0: 1, 1: 1, 2: 0, 3: 1}),
        samples=answered({0: [1, 1], 1: [0, 1], 2: [0, 0], 3: [0, 0]}),
        shuffled=answered({0: 0, 1: 0, 2: 1}),
        blank=answered({0: 0, 1: 0, 2: 0, 3: 1}),
        shuffled_dependence={"test/0": 1.0, "test/2": 0.5, "test/9": 7.0},
        blank_dependence={"test/0": 1.0, "test/1": 2.0, "test/2": -0.5, "test/3": 0.5},
        skipped={4: "row 4 has no image"},
    )
    return EvalResults(rows=tuple(map(row, range(4))), targets=(first, second))


def test_accuracies_are_by_kind_and_by_image_type() -> None:
    base, trained = target_metrics(results())
    assert (base.accuracy.mean, trained.accuracy.mean) == (0.5, 0.75)
    assert {kind: x.mean for kind, x in trained.by_kind.items()} == {"colour": 1.0, "count": 0.5}
    by_image_type = {name: (x.mean, x.n) for name, x in trained.by_image_type.items()}
    assert by_image_type == {"drawing": (1.0, 1), "photo": (pytest.approx(2 / 3), 3)}
    assert (base.rows_skipped, trained.rows_skipped) == (0, 1)


def test_targets_are_compared_with_the_first_in_pairs() -> None:
    base, trained = target_metrics(results())
    assert (base.versus_first, base.versus_first_by_kind) == (None, {})
    found = trained.versus_first
    assert (found.mean, found.better, found.worse) == (0.25, 1, 0)
    assert (found.low, found.high) == bootstrap_interval([0.0, 1.0, 0.0, 0.0])
    assert {kind: x.mean for kind, x in trained.versus_first_by_kind.items()} == {"colour": 0.5, "count": 0.0}


def test_sampled_answers_give_pass_at_k_and_a_vote() -> None:
    base, trained = target_metrics(results())
    assert (base.pass_at, base.majority) == ({}, None)
    assert {k: x.mean for k, x in trained.pass_at.items()} == {1: 3 / 8, 2: 0.5}
    assert trained.majority.mean == 0.25, "of two answers that differ the first counts"


def test_what_a_control_loses_is_told_on_the_rows_it_has() -> None:
    """Shuffled: rows 0 to 2, true (1, 1, 0), changed (0, 0, 1)."""
    base, trained = target_metrics(results())
    assert base.image_ablation is None
    ablation = trained.image_ablation
    assert (ablation.true.mean, ablation.shuffled.mean, ablation.blank.mean) == (0.75, pytest.approx(1 / 3), 0.25)
    assert (ablation.lost_by_shuffling.mean, ablation.lost_by_shuffling.n) == (pytest.approx(1 / 3), 3)
    assert (ablation.lost_by_shuffling.better, ablation.lost_by_shuffling.worse) == (2, 1)
    assert ablation.lost_by_blanking.mean == 0.5


def test_dependence_is_a_mean_over_the_rows_of_all_targets() -> None:
    base, trained = target_metrics(results())
    assert base.picture_dependence is None
    shuffled, blank = trained.picture_dependence.shuffled, trained.picture_dependence.blank
    assert (shuffled.mean, shuffled.n, blank.mean, blank.n) == (0.75, 2, 0.75, 4)


def printed(found: EvalResults, width: int) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    for table in tables(target_metrics(found), "Accuracy of 4 rows"):
        console.print(table)
    return console.export_text()


def test_tables_say_what_was_read_and_nothing_else() -> None:
    text = printed(results(), 160)
    headings = ("Accuracy of 4 rows", "minus that of base", "Mean reward", "question type", "image type", "pass@2")
    for heading in (*headings, "Image ablation", "Dependence on the picture: nats per token", "+25.0"):
        assert heading in text, heading
    plain = EvalResults(rows=results().rows, targets=results().targets[:1])
    assert len(tables(target_metrics(plain), "x")) == 4, "accuracy, question types, image types, rewards"


def test_tables_are_legible_at_80_columns() -> None:
    """Every figure stands on one line with its interval, whatever the targets are called."""
    base, trained = results().targets
    long = replace(trained, name="runs/geometry-with-a-long-name/checkpoints/step-750")
    third = replace(trained, name="Qwen/Qwen3-VL-2B-Instruct")
    lines = printed(EvalResults(rows=results().rows, targets=(base, long, third)), 80).splitlines()
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if "…" in line]
    assert not [line for line in lines if line.count("[") != line.count("]")], "an interval is cut in two"


def test_texts_are_short_whatever_their_unit() -> None:
    assert mean_text(Estimate(mean=0.5, low=0.3012, high=0.7, n=9)) == "0.5 [0.301, 0.7]"
    assert mean_text(Estimate(mean=1234.5, low=987.6, high=20015.2, n=9)) == "1,235 [988, 20,015]"
    assert mean_text(Estimate(mean=2.0, low=math.nan, high=math.nan, n=1)) == "2"
    _, trained = target_metrics(results())
    found = map(percent_text, (trained.by_kind["colour"], trained.versus_first, None))
    assert list(found) == ["100.0 [34, 100]", "+25.0 [+0.0, +75.0]", ""]


def test_json_holds_figures_and_every_answer(tmp_path: Path) -> None:
    path, both = tmp_path / "eval.json", results()
    write_json(path, both, target_metrics(both), {"split": "test"}, {"seed": 0})
    content = json.loads(path.read_text())
    of_trained = content["targets"][1]
    assert (content["split"], of_trained["accuracy"]["mean"], of_trained["pass_at"]["2"]["mean"]) == ("test", 0.75, 0.5)
    assert content["skipped"] == {"base": [], "trained": [{"index": 4, "reason": "row 4 has no image"}]}
    assert content["rows"][1]["truth"] == "1"
    trained = content["rows"][1]["answers"]["trained"]
    assert trained["greedy"]["accuracy"] == 1.0
    assert [answer["turns"][-1]["text"] for answer in trained["samples"]] == ["0", "1"]
    assert trained["shuffled_images"]["accuracy"] == 0.0
    assert "shuffled_images" not in content["rows"][3]["answers"]["trained"]
