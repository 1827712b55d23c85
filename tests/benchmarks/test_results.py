"""Finished runs: tables of their summaries, learning curves and their controls, growth of a step, boxes of saliency."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image
from rich.console import Console

from benchmarks import controls, curves, results
from benchmarks.controls import SHARE, random_geo3k, random_geospot
from benchmarks.curves import draw_name, read_curve
from benchmarks.growth import FLOOR_OF, QUICK_BASE, Axis, draw_growth, floor_line, growth_of, growth_table, measure
from benchmarks.results import T_975
from benchmarks.saliency_boxes import Seen, asked_box, of_best, of_chance, of_map, ratio, seen
from benchmarks.told_scenes import ToldScenes
from fovea.metrics.log import JsonlSink
from fovea.report.summary import Summary, write_summary
from fovea.types import Evaluation
from fovea_gym.environments.shapes.environment import Shapes
from fovea_gym.settings.environments import ShapesEnvironment
from fovea_gym.types import Task, Turn
from fovea_tools.saliency.maps import AnswerMap
from fovea_tools.saliency.occluder import Saliency
from fovea_tools.saliency.occlusion import OcclusionMap


def summarised_run(folder: Path, *, seed: int, warmup: float | None, final: tuple[float, ...]) -> Path:
    folder.mkdir()
    readings = {
        "before": Evaluation(accuracies={"colour": (0.0,), "count": (1.0, 0.0, 0.0)}),
        "warmup": None if warmup is None else Evaluation(accuracies={"colour": (warmup,)}),
        "final": Evaluation(accuracies={"colour": (1.0,), "count": final}, parts={"answer": (0.125,)}),
        "shuffled_images": Evaluation(accuracies={"colour": (0.2,)}),
        "blank_images": None,
    }
    times = {"warmup_seconds": 1.0, "rl_seconds": 1.0, "total_seconds": 2.0}
    summary = Summary(**readings, **times, duplicates_across_splits=None, steps=7, seed=seed)  # type: ignore[arg-type]
    write_summary(folder / "summary.json", summary)
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    first = summarised_run(tmp_path / "a", seed=0, warmup=0.5, final=(1.0, 1.0, 0.0))
    second = summarised_run(tmp_path / "b", seed=1, warmup=None, final=(0.0, 0.0, 0.0))
    return [f"GRPO={first},{second}"]


def cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]


def test_a_line_per_run_with_accuracies_by_type_or_parts(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    results.main(runs)
    headers, _, *lines = cells(capsys.readouterr().out)[:4]
    of_first, of_second = (dict(zip(headers, line, strict=True)) for line in lines)
    expected = {"run": "GRPO", "seed": "0", "steps": "7", "rows": "4", "shuffled": "0.200", "blank": "-"}
    expected |= {"before RL": "0.500", "colour": "1.000", "count": "0.667"}
    assert {name: of_first[name] for name in expected} == expected
    assert of_first["after"].startswith("0.750 [0.")
    # without a warm-up, RL began from the model as it was
    assert (of_second["seed"], of_second["before RL"]) == ("1", "0.250")
    results.main(["--parts", *runs])
    headers, _, first, *_ = cells(capsys.readouterr().out)
    assert "colour" not in headers
    assert dict(zip(headers, first, strict=True))["answer"] == "0.125"


def test_a_line_per_name_has_the_intervals_over_its_seeds(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Changes of .25 and 0: a mean of .125 with s = .1768, so that 12.706 s / sqrt(2) = 1.588.

    Sampled rewards of 30 steps rise from .25 to .75, or to .5, by what the environment would have given.
    """
    for folder, last in zip(runs[0].removeprefix("GRPO=").split(","), (0.75, 0.5), strict=True):
        rewards = [0.25] * 10 + [0.5] * 10 + [last] * 10
        rows = [{"step": step, "reward": 1.0, "reward/true": reward} for step, reward in enumerate(rewards, 1)]
        (Path(folder) / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        (Path(folder) / "answers").mkdir()
        for name, parts in (("before", [{"km": 9.0}, {}, {}]), ("final", [{"km": 1.0}, {"km": 3.0}, {}])):
            lines = "".join(f"{json.dumps({'answers': [{'parts': part}]})}\n" for part in parts)
            (Path(folder) / "answers" / f"test-{name}.jsonl").write_text(lines)
    results.main([*runs, "--kinds", "count", "col", "--medians", "km"])
    headers, _, line = cells(capsys.readouterr().out)[-3:]
    assert line[:3] == ["GRPO", "2", "7"]
    assert line[3:6] == ["0.375", "0.562", "0.188 [-0.607, 0.982]"]
    assert line[6:9] == ["0.375", "0.500", "0.125 [-1.463, 1.713]"]
    assert headers[9:15] == ["count before", "count", "col before", "col", "median km before", "after"]
    assert line[9:15] == ["-", "0.333", "0.250", "1.000", "inf", "3"]
    assert dict(zip(headers[15:], line[15:], strict=True)) == {"shuffled": "0.200", "blank": "-"}
    results.main([runs[0].partition(",")[0]])
    assert len(cells(capsys.readouterr().out)) == 3, "one run has no spread over seeds"


def test_the_points_of_students_distribution_leave_a_fortieth_above_them() -> None:
    for degrees, point in enumerate(T_975, start=1):
        x = torch.linspace(0, point, 200_001, dtype=torch.float64)
        density = torch.distributions.StudentT(torch.tensor(float(degrees), dtype=torch.float64)).log_prob(x).exp()
        assert torch.trapezoid(density, x).item() == pytest.approx(0.475, abs=2e-5)  # they have three digits


def run(folder: Path, *, readings: bool = True) -> Path:
    folder.mkdir()
    sink = JsonlSink(folder)
    for step in range(1, 5):
        # the second step drew twice as many tokens, as dynamic sampling does
        metrics = {"tokens_per_second": 200.0 if step == 2 else 100.0, "seconds/step": 2.0, "entropy": 1 / step}
        # a step that trained on nothing has none
        metrics |= {"mismatch_trained/abs": step / 1000} if step < 4 else {}
        sink.write(step, metrics | ({"accuracy/dev": step / 10} if readings and step % 2 == 0 else {}))
    sink.close()
    return folder


def test_tokens_are_all_that_were_drawn_and_another_metric_can_be_read(tmp_path: Path) -> None:
    curve = read_curve("a", folder := run(tmp_path / "a"))
    assert (curve.tokens, curve.steps) == ([600, 1000], [2, 4])
    assert (curve.readings, curve.entropy) == ([0.2, 0.4], [0.5, 0.25])
    assert curve.engine_gap == pytest.approx(0.002)
    assert read_curve("a", folder, "entropy").readings == [1, 1 / 2, 1 / 3, 1 / 4]
    with pytest.raises(ValueError, match="has no dev/reward; "):
        read_curve("a", folder, "dev/reward")


def test_a_run_without_readings_says_what_to_set(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\baccuracy/dev\b.*\bevaluate\.every_steps\b"):
        read_curve("a", run(tmp_path / "a", readings=False))


def test_more_names_than_colours_can_be_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"{name}={run(tmp_path / name)}" for name in "abcde"]
    curves.main(["--out", str(tmp_path / "curves.png"), "--entropy", *words])
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.count("1,000") == 5


def test_runs_of_one_name_that_were_read_at_the_same_steps_have_their_mean_drawn(tmp_path: Path) -> None:
    seeds = [read_curve("a", run(tmp_path / str(seed))) for seed in range(3)]
    seeds = [replace(curve, readings=[0.1 * (number + 1), 0.3]) for number, curve in enumerate(seeds)]
    panel = Figure().subplots()
    draw_name(panel, seeds, [curve.readings for curve in seeds], "black")
    *_, mean = panel.lines
    assert len(panel.lines) == 4
    assert list(mean.get_ydata()) == pytest.approx([0.2, 0.3])
    other = replace(seeds[0], steps=[1, 4])
    draw_name(panel, [other, seeds[1]], [other.readings, seeds[1].readings], "black")
    assert len(panel.lines) == 6, "readings at other steps have no mean"


def test_a_line_has_slope_and_start() -> None:
    growth = growth_of([1, 2, 4], [3.0, 5.0, 9.0], [1.0, 1.5, 2.5])
    figures = (growth.seconds_each, growth.seconds_at_0, growth.r2, growth.gib_each)
    assert figures == pytest.approx((2.0, 1.0, 1.0, 0.5))
    # the line through (0, 0), (1, 3), (2, 3) is 0.5 + 1.5 x; squares 1.5 of 6 are left
    assert growth_of([0, 1, 2], [0.0, 3.0, 3.0], []).r2 == pytest.approx(0.75)
    # the floor is the slope without a prompt
    lines = {"completions per prompt": [1.0, 1.5], "completions, no prompt": [0.5, 0.9]}
    found = floor_line({name: growth_of([2, 4], seconds, []) for name, seconds in lines.items()})
    assert "250.0 ms a step; without a prompt 200.0 ms; 1.25 times its floor" in found


def test_a_quick_run_measures_and_draws(tmp_path: Path) -> None:
    axes = [
        Axis(name="completions per prompt", field="samples", values=(2, 3)),
        Axis(name="completions, no prompt", field="samples", values=(2, 3)),
        Axis(name="prompt tokens", field="question_words", values=(16, 40)),
        Axis(name="images per prompt", field="images", values=(1, 2)),
    ]
    found = measure(QUICK_BASE, axes, steps=1, memory=False, quick=True)
    shortest, longest = found["prompt tokens"].x
    assert longest - shortest >= 24, "a word is a token or more"
    assert all(second > 0 for growth in found.values() for second in growth.seconds)
    printed = io.StringIO()
    Console(file=printed, width=130).print(growth_table(found))
    assert "images per prompt" in printed.getvalue()
    draw_growth({name: asdict(growth) for name, growth in found.items()}, tmp_path / "growth.png", floor_of=FLOOR_OF)
    assert (tmp_path / "growth.png").read_bytes().startswith(b"\x89PNG")


PARIS = {"city": "Paris", "region": None, "country": "France", "lat": 48.86, "lon": 2.35}
GRADED = {
    random_geo3k: (Task(id="0", question="", answer="5", images=(), row={}), "\\boxed{5}", "\\boxed{6}"),
    random_geospot: (
        Task(id="0", question="", answer="", images=(), row=PARIS),
        "City: Paris\nCountry: France\nLatitude: 48.86\nLongitude: 2.35",
        "Country: Spain",
    ),
}


@pytest.mark.parametrize("reward", GRADED)
def test_a_random_reward_is_the_same_for_right_and_wrong_answers(reward: object) -> None:
    task, right, wrong = GRADED[reward]  # type: ignore[index]
    for text, share in ((right, 1), (wrong, 0)):
        scores = [asyncio.run(reward(task, text, ())) for _ in range(400)]  # type: ignore[operator]
        assert {score["accuracy"] for score in scores} == {share}
        assert all(score["true"] == pytest.approx(share) for score in scores)
        # a binomial's deviation is .023
        assert sum(score["reward"] for score in scores) / 400 == pytest.approx(SHARE, abs=0.12)


def test_pictures_are_swapped_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = pa.table({"problem": [str(n) for n in range(20)], "images": [[n] for n in range(20)]})
    pq.write_table(rows, tmp_path / "rows.parquet")
    monkeypatch.setattr(sys, "argv", ["controls", str(tmp_path / "rows.parquet"), str(tmp_path / "swapped.parquet")])
    controls.main()
    swapped = pq.read_table(tmp_path / "swapped.parquet")
    assert swapped["problem"] == rows["problem"]
    assert sorted(swapped["images"].to_pylist()) == rows["images"].to_pylist() != swapped["images"].to_pylist()


def test_three_tenths_of_the_questions_tell_their_answer_and_no_answer_is_more_frequent_there() -> None:
    """And its own answers earn full marks."""
    scenes = ToldScenes()
    tasks = scenes.tasks("train")[:40]
    numbers = Counter((task.kind, task.answer) for task in tasks)
    assert numbers == {(kind, number): 3 if kind == "told" else 7 for kind in ("told", "seen") for number in "1234"}
    for task in tasks:
        assert (f"There are {task.answer}." in task.question) == (task.kind == "told")
        assert task.images
    for task in scenes.tasks("dev")[:40]:
        scores = [scenes.score(task, [Turn(messages=(), text=text)]) for text in (scenes.target(task), "5")]
        assert [asyncio.run(score).reward for score in scores] == [1, 0]


def one(falls: list[list[float]], box: tuple[float, float, float, float]) -> Seen:
    """A map of 8 x 8 px in patches of 4."""
    of_map: dict[str, Any] = {"id": "test/0", "question": "", "answer": "\\boxed{red}", "image": 1, "weights": ""}
    of_map |= {"logprob": 0.0, "patch_px": 4, "size": (8, 8), "falls": tuple(map(tuple, falls))}
    lit = OcclusionMap(logprob=0.0, falls_RC=np.array(falls, np.float32), side_px=4)
    found = Saliency(row=0, numbers=AnswerMap(**of_map), map=lit, picture=Image.new("RGB", (8, 8)))
    return seen(found, Task(id="test/0", question="", answer="red", kind="colour"), box)


@pytest.mark.parametrize("level", [1, (1, 2), 3])
def test_the_box_is_that_of_the_object(level: object) -> None:
    settings = ShapesEnvironment.model_validate({"level": level, "test_size": 48})
    tasks = Shapes(settings, seed=3).tasks("test")
    boxes = {row: asked_box(tasks[row], row, settings) for row in range(len(tasks))}
    assert all(boxes[row] for row in boxes if tasks[row].kind in ("colour", "shape"))
    single = {tasks[row].answer for row in boxes if boxes[row] and tasks[row].kind in ("counting", "existence")}
    assert single == {"1", "yes"}
    alone = [row for row in boxes if boxes[row] and tasks[row].kind == "colour" and settings.level == 1]
    for row in alone:
        pixels_YXC = np.asarray(tasks[row].images[0].source).astype(int)
        y, x = np.nonzero(np.ptp(pixels_YXC, axis=2) > 80)  # objects are coloured, the ground is grey
        assert boxes[row] == pytest.approx((x.min(), y.min(), x.max() + 1, y.max() + 1), abs=1.5)
    assert bool(alone) == (level == 1)


def test_as_many_patches_are_taken_as_the_box_has_the_area_of() -> None:
    """A box of one patch: the right one overlaps it whole, another not at all, two drawn in four at 1/4 each."""
    right = one([[0.0, 2.0], [1.0, -1.0]], (4, 0, 8, 4))
    assert (right.number, right.is_right, right.most) == (1, True, 2.0)
    assert of_map(right, right.falls_N) == of_best(right) == 1.0
    assert of_map(right, np.array([3.0, 2.0, 1.0, 0.0])) == 0.0
    assert of_chance(right, np.random.default_rng(0)) == pytest.approx(0.25, abs=0.1)
    wide = one([[0.0, 2.0], [1.0, -1.0]], (2, 0, 8, 4))  # 24 px, 1.5 patches
    assert (wide.number, of_map(wide, wide.falls_N), of_best(wide)) == pytest.approx((2, 16 / 40, 24 / 32))


def test_a_ratio_of_means_has_an_interval() -> None:
    assert ratio(np.array([0.4, 0.6]), np.array([0.1, 0.1])) == pytest.approx((5.0, 4.0, 6.0))
    assert ratio(np.array([0.4]), np.array([0.0]))[2] == np.inf
