"""Metrics of several targets from answers written by hand; intervals, pass@k and votes by hand and by brute force."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from fovea.evaluation.comparison import EvalResults, TargetAnswers, target_metrics
from fovea.evaluation.json_file import write_json
from fovea.evaluation.records import AnsweredRow, TaskRow
from fovea.evaluation.statistics import (
    best_of,
    bootstrap_interval,
    budgets,
    majority,
    mean_text,
    paired_difference,
    percent_text,
    vote,
)
from fovea.report.tables import tables
from fovea_gym.benchmarks.estimates import Estimate, estimate, mean_estimate, wilson_interval
from gym_tests.tables import table
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


def test_figures_of_targets_are_those_of_their_answers() -> None:
    base, trained = target_metrics(results())
    assert (base.accuracy.mean, trained.accuracy.mean) == (0.5, 0.75)
    assert {kind: x.mean for kind, x in trained.by_kind.items()} == {"colour": 1.0, "count": 0.5}
    by_image_type = {name: (x.mean, x.n) for name, x in trained.by_image_type.items()}
    assert by_image_type == {"drawing": (1.0, 1), "photo": (pytest.approx(2 / 3), 3)}
    assert (base.rows_skipped, trained.rows_skipped) == (0, 1)
    # with the first in pairs
    assert (base.versus_first, base.versus_first_by_kind) == (None, {})
    found = trained.versus_first
    assert (found.mean, found.better, found.worse) == (0.25, 1, 0)
    assert (found.low, found.high) == bootstrap_interval([0.0, 1.0, 0.0, 0.0])
    assert {kind: x.mean for kind, x in trained.versus_first_by_kind.items()} == {"colour": 0.5, "count": 0.0}
    # of sampled answers
    assert (base.pass_at, base.majority) == ({}, None)
    assert {k: x.mean for k, x in trained.pass_at.items()} == {1: 3 / 8, 2: 0.5}
    assert trained.majority.mean == 0.25, "of two answers that differ the first counts"
    # of a control, on the rows that it has: shuffled 0 to 2, true (1, 1, 0), changed (0, 0, 1)
    assert base.image_ablation is None
    ablation = trained.image_ablation
    assert (ablation.true.mean, ablation.shuffled.mean, ablation.blank.mean) == (0.75, pytest.approx(1 / 3), 0.25)
    assert (ablation.lost_by_shuffling.mean, ablation.lost_by_shuffling.n) == (pytest.approx(1 / 3), 3)
    assert (ablation.lost_by_shuffling.better, ablation.lost_by_shuffling.worse) == (2, 1)
    assert ablation.lost_by_blanking.mean == 0.5
    # the dependence, a mean over the rows of all targets
    assert base.picture_dependence is None
    shuffled, blank = trained.picture_dependence.shuffled, trained.picture_dependence.blank
    assert (shuffled.mean, shuffled.n, blank.mean, blank.n) == (0.75, 2, 0.75, 4)


def printed(found: EvalResults, width: int) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    for each in tables(target_metrics(found), "Accuracy of 4 rows"):
        console.print(each)
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


def binomial_quantile(n: int, p: float, level: float) -> int:
    total = 0.0
    for k in range(n + 1):
        total += math.comb(n, k) * p**k * (1 - p) ** (n - k)
        if total >= level:
            return k
    return n


@pytest.mark.parametrize(("n", "right"), [(50, 20), (200, 150), (800, 790)])
def test_a_resample_of_zeros_and_ones_is_binomial(n: int, right: int) -> None:
    """So that the percentiles are known; 10,000 resamples may be off by one row."""
    low, high = bootstrap_interval([1.0] * right + [0.0] * (n - right))
    assert abs(low * n - binomial_quantile(n, right / n, 0.025)) <= 1
    assert abs(high * n - binomial_quantile(n, right / n, 0.975)) <= 1


def test_counts_of_distinct_values_are_as_good_as_rows_and_intervals_are_seeded() -> None:
    """Against resampling row by row."""
    values = np.random.default_rng(1).beta(0.3, 0.5, 120).round(2)
    rng = np.random.default_rng(2)
    means = [rng.choice(values, len(values)).mean() for _ in range(10_000)]
    assert bootstrap_interval(values.tolist()) == pytest.approx(np.quantile(means, (0.025, 0.975)), abs=0.004)
    values = [0.0, 1.0, 1.0, 0.3]
    assert bootstrap_interval(values, seed=3) == bootstrap_interval(values, seed=3)
    assert all(math.isnan(x) for x in bootstrap_interval([]))


@table("values", [[0.0] * 16, [1.0] * 16, [1.0, 0.0, 1.0, 1.0], [0.5] * 16, [0.5]])
def test_an_estimate_of_shares_and_of_equal_values_is_wilsons(values: list[float]) -> None:
    found, mean = estimate(values), sum(values) / len(values)
    assert found.mean == pytest.approx(mean)
    assert (found.low, found.high) == pytest.approx(wilson_interval(mean, len(values)))


@table("n", [1, 2, 16, 150, 800, 1319])
def test_a_bound_of_none_or_all_is_exact(n: int) -> None:
    assert wilson_interval(0.0, n)[0] == 0.0
    assert wilson_interval(1.0, n)[1] == 1.0
    assert mean_text(mean_estimate([0.0] * n)).startswith("0 [0, ")


def test_an_estimate_of_partial_credits_by_hand() -> None:
    """s^2 = (2 * 0.5^2 + 2 * 0.3^2 + 2 * 0.1^2) / 5 = 0.14 of six values around 0.5: 1.96 * sqrt(0.14 / 6) = 0.299."""
    found = estimate([0.2, 0.4, 0.6, 0.8])
    assert (found.mean, found.low, found.high, found.n) == pytest.approx((0.5, 0.201, 0.799, 4), abs=5e-4)
    assert estimate([1.0, 1.0, 0.9]).high == 1.0
    assert estimate([0.0, 0.0, 0.1]).low == 0.0


POPULATIONS = {
    "spread": np.random.default_rng(0).beta(2, 3, 5000),
    "at both ends": np.random.default_rng(0).beta(0.5, 0.8, 5000),
    "nearly right, seldom wrong": np.repeat([1.0, 0.9, 0.0], [50, 45, 5]),
    "VQA's thirds": np.repeat([1.0, 2 / 3, 0.0], [70, 20, 10]),
    "seldom right": np.repeat([1.0, 0.5, 0.0], [2, 3, 95]),
}


@pytest.mark.parametrize("n", [10, 20, 60, 300])
@pytest.mark.parametrize("population", POPULATIONS)
def test_an_interval_of_partial_credits_covers_their_mean_as_often_as_it_says(population: str, n: int) -> None:
    values, rng = POPULATIONS[population], np.random.default_rng(1)
    drawn = [estimate(rng.choice(values, n).tolist()) for _ in range(2000)]
    covered = np.mean([each.low <= values.mean() <= each.high for each in drawn])
    # 2,000 draws: the share itself is known to 0.01
    assert covered > 0.935
    wilsons = [wilson_interval(each.mean, n) for each in drawn]
    assert np.mean([each.high - each.low for each in drawn]) < np.mean([high - low for low, high in wilsons])


def test_pairs_that_move_together_leave_a_small_difference() -> None:
    """Two targets at 50 % that differ on 2 of 100 rows, once each way and once more for the second."""
    first = [1.0, 0.0] * 50
    second = [1.0, 1.0, first[2], 1.0, 0.0, *first[5:]]
    found = paired_difference(first, second)
    assert (found.mean, found.better, found.worse, found.n) == (0.01, 2, 1, 100)
    # d is +1 twice, -1 once: the deviation of its mean is sqrt(3 / 100 - 0.01^2) / 10
    # and one step of the grid, for means of 100 whole numbers lie 0.01 apart
    assert found.low == pytest.approx(0.01 - 1.96 * 0.0173, abs=0.011)
    assert found.high == pytest.approx(0.01 + 1.96 * 0.0173, abs=0.011)
    alone = estimate(first)
    assert found.high - found.low < (alone.high - alone.low) / 2


def test_targets_that_never_differ_are_not_certain_to_be_equal() -> None:
    """0 of 96 rows: up to z^2 / (n + z^2) = 3.84 / 99.84 of all rows may be otherwise."""
    found = paired_difference([1.0] * 96, [1.0] * 96)
    assert (found.mean, found.high) == (0.0, pytest.approx(0.0385, abs=1e-4))
    assert found.low == -found.high
    assert paired_difference([0.0] * 96, [1.0] * 96).high == 1.0


def test_the_best_of_many_answers_and_of_too_few() -> None:
    assert best_of(512, [1.0] * 1030) == best_of(1024, [0.0] + [1.0] * 2047) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="the best of 6 answers cannot be estimated from 5"):
        best_of(6, [0] * 5)
    assert [budgets(n) for n in (0, 1, 4, 6)] == [[], [1], [1, 2, 4], [1, 2, 4, 6]]


@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=7), st.data())
def test_the_best_of_k_is_the_mean_over_all_subsets(scores: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(scores)))
    subsets = [max(subset) for subset in combinations(scores, k)]
    assert best_of(k, scores) == pytest.approx(sum(subsets) / len(subsets))


@given(st.integers(1, 40), st.data())
def test_pass_at_k_is_chens(n: int, data: st.DataObject) -> None:
    right, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    chen = 1 - math.comb(n - right, k) / math.comb(n, k)
    assert best_of(k, [1.0] * right + [0.0] * (n - right)) == pytest.approx(chen)


def test_the_majority_is_by_box_and_a_tie_goes_to_the_first() -> None:
    for texts, text in (
        ((r"so \boxed{12}", r"\boxed{7}", r"\boxed{ 12 }", "7"), r"so \boxed{12}"),
        (("red", "Blue", "blue "), "Blue"),
        (("c", "b", "a"), "c"),
        # equal answers are one
        ((r"\boxed{3}", r"\boxed{0.5}", r"\boxed{3.0}", r"\boxed{\frac12}", r"\boxed{x = 1/2}"), r"\boxed{0.5}"),
        (("Yes.", "no", "no", "yes", r"\text{Yes}"), "Yes."),
        (("12 cm", "12 m", "12 m", "12 mm"), "12 m"),
    ):
        assert majority([said(each) for each in texts]).text == text
    assert vote(r"\boxed{A \frac{1}{2}}") == r"a \frac{1}{2}"
