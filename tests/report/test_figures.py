"""The figures of the overview: headline, tables with intervals, time and memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from fovea.metrics.log import JsonlSink, MetricsLog
from fovea.report.summary import Summary, write_summary
from fovea.report.viewed_run import ViewedRun
from fovea.types import Evaluation
from tests.report.folders import evaluation_of, summary_of

SUMMARY = summary_of(
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
    shown = shown_of(tmp_path, SUMMARY)
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
    shown = shown_of(tmp_path, summary_of(evaluation_of(all=(1, 2)), before=SUMMARY.before))
    assert shown["tables"][0]["columns"] == ("before RL", "after RL")
    assert rows_of(shown["tables"][0]) == [("all", "0.0 [0, 16]", "50.0 [9, 91]", 2)]
    assert shown["notes"] == ()


def test_rewards_parts_and_image_types_have_intervals_and_equal_ones_stand_once(tmp_path: Path) -> None:
    parts = {"answer": (0.5,) * 10 + (1.0,) * 10, "form": (0.0, 1.0)}
    final = replace(SUMMARY.final, rewards=parts["answer"], parts=parts, by_image_type={"map": (1.0,)}, num_unscored=3)
    shown = shown_of(tmp_path, replace(SUMMARY, warmup=None, before=None, final=final))
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
