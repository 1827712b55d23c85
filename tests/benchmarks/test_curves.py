"""Curves of finished runs, read from their metrics, and the lines of `benchmarks.growth`."""

from __future__ import annotations

import io
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from benchmarks.curves import draw_name, main, read_curve
from benchmarks.growth import FLOOR_OF, QUICK_BASE, Axis, draw_growth, floor_line, growth_of, growth_table, measure
from fovea.metrics.log import JsonlSink


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


def test_tokens_are_all_that_were_drawn(tmp_path: Path) -> None:
    curve = read_curve("a", run(tmp_path / "a"))
    assert curve.tokens == [600, 1000]
    assert curve.steps == [2, 4]
    assert curve.readings == [0.2, 0.4]
    assert curve.entropy == [0.5, 0.25]
    assert curve.engine_gap == pytest.approx(0.002)


def test_a_run_without_readings_says_what_to_set(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\baccuracy/dev\b.*\bevaluate\.every_steps\b"):
        read_curve("a", run(tmp_path / "a", readings=False))


def test_more_names_than_colours_can_be_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"{name}={run(tmp_path / name)}" for name in "abcde"]
    main(["--out", str(tmp_path / "curves.png"), "--entropy", *words])
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.count("1,000") == 5


def test_another_metric_can_be_read(tmp_path: Path) -> None:
    folder = run(tmp_path / "a")
    assert read_curve("a", folder, "entropy").readings == [1, 1 / 2, 1 / 3, 1 / 4]
    with pytest.raises(ValueError, match="has no dev/reward; "):
        read_curve("a", folder, "dev/reward")


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
    assert growth.seconds_each == pytest.approx(2.0)
    assert growth.seconds_at_0 == pytest.approx(1.0)
    assert growth.r2 == pytest.approx(1.0)
    assert growth.gib_each == pytest.approx(0.5)
    # the line through (0, 0), (1, 3), (2, 3) is 0.5 + 1.5 x; squares 1.5 of 6 are left
    assert growth_of([0, 1, 2], [0.0, 3.0, 3.0], []).r2 == pytest.approx(0.75)


def test_the_floor_is_the_slope_without_a_prompt() -> None:
    found = {
        "completions per prompt": growth_of([2, 4], [1.0, 1.5], []),
        "completions, no prompt": growth_of([2, 4], [0.5, 0.9], []),
    }
    assert "250.0 ms a step; without a prompt 200.0 ms; 1.25 times its floor" in floor_line(found)


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
