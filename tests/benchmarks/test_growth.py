"""The lines of `benchmarks.growth`, and a small run of it."""

from __future__ import annotations

import io
from dataclasses import asdict
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.growth import FLOOR_OF, QUICK_BASE, Axis, draw_growth, floor_line, growth_of, growth_table, measure


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
    console = Console(file=io.StringIO(), width=130)
    console.print(growth_table(found))
    assert isinstance(console.file, io.StringIO)
    assert "images per prompt" in console.file.getvalue()
    draw_growth({name: asdict(growth) for name, growth in found.items()}, tmp_path / "growth.png", floor_of=FLOOR_OF)
    assert (tmp_path / "growth.png").read_bytes().startswith(b"\x89PNG")
