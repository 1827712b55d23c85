"""The figures of the overview: headline, tables with intervals, time and memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from fovea.metrics.log import JsonlSink, MetricsLog
from fovea.report.summary import Summary, write_summary
from fovea.report.viewed_run import ViewedRun
from fovea.types import Evaluation

SUMMARY = Summary(
    before=Evaluation(accuracies={"count": (0.0,) * 10, "colour": (0.0,) * 10}),
    warmup=Evaluation(accuracies={"count": (1.0,) * 4 + (0.0,) * 6, "colour": (1.0,) * 6 + (0.0,) * 4}),
    final=Evaluation(accuracies={"count": (1.0,) * 8 + (0.0,) * 2, "colour": (1.0,) * 10}),
    shuffled_images=Evaluation(accuracies={"count": (1.0, 0.0, 0.0)}),
    blank_images=None,
    duplicates_across_splits=2,
    warmup_seconds=20.5,
    rl_seconds=100.0,
    total_seconds=130.25,
    steps=1200,
    seed=3,
)


def summary_of(folder: Path, summary: Summary) -> dict[str, Any]:
    write_summary(folder / "summary.json", summary)
    return ViewedRun(folder).summary()


def rows_of(table: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [(row["name"], *row["texts"], row["n"]) for row in table["rows"]]


def test_headline_types_and_notes(tmp_path: Path) -> None:
    shown = summary_of(tmp_path, SUMMARY)
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


def test_partial_credits_have_the_interval_of_a_mean(tmp_path: Path) -> None:
    """That of `estimate`, which test_statistics has by hand: 0.5 +- 0.299."""
    final = Evaluation(accuracies={"all": (0.2, 0.4, 0.6, 0.8)})
    shown = summary_of(tmp_path, replace(SUMMARY, warmup=None, before=None, final=final))
    assert rows_of(shown["tables"][0]) == [("all", "50.0 [20, 80]", 4)]


def test_a_run_without_warmup_has_no_such_column(tmp_path: Path) -> None:
    final = Evaluation(accuracies={"all": (1.0, 0.0)})
    rl_only = replace(SUMMARY, warmup=None, final=final, shuffled_images=None, duplicates_across_splits=None)
    shown = summary_of(tmp_path, rl_only)
    assert shown["tables"][0]["columns"] == ("before RL", "after RL")
    assert rows_of(shown["tables"][0]) == [("all", "0.0 [0, 16]", "50.0 [9, 91]", 2)]
    assert shown["notes"] == ()


def test_rewards_parts_and_image_types_have_intervals_and_equal_ones_stand_once(tmp_path: Path) -> None:
    parts = {"answer": (0.5,) * 10 + (1.0,) * 10, "form": (0.0, 1.0)}
    final = replace(SUMMARY.final, rewards=parts["answer"], parts=parts, by_image_type={"map": (1.0,)}, num_unscored=3)
    shown = summary_of(tmp_path, replace(SUMMARY, warmup=None, before=None, final=final))
    accuracies, rewards = shown["tables"]
    assert rows_of(accuracies)[-1] == ("images: map", "100.0 [21, 100]", 1)
    assert rows_of(rewards) == [("reward, answer", "0.75 [0.638, 0.862]", 20), ("form", "0.5 [0.0945, 0.905]", 2)]
    assert "Rows not scored and left out: 3 after RL." in shown["notes"]


def test_a_young_run_shows_its_reward_its_time_and_its_memory(tmp_path: Path) -> None:
    with MetricsLog([JsonlSink(tmp_path)]) as log:
        for step in range(1, 21):
            times = {"seconds/rollout": 0.25, "seconds/update": 0.5, "seconds/checkpoint": 9.0, "seconds/step": 1.0}
            times |= {"seconds/weight_sync": 0.125}
            log.write(
                step, {"reward": step / 100, "memory/peak_rss_gib": step / 10, "tokens_per_second": 7.0 * step} | times
            )
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
    assert [(each["label"], each["value"]) for each in shown["machine"]] == [
        ("peak memory", "2.00 GiB"),
        ("tokens/s", "136"),
    ]
