from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from fovea.metrics.log import JsonlSink
from fovea.report.curves import MAX_POINTS, Curves, downsampled
from fovea_gym.errors import DataError


def test_a_short_curve_is_kept_as_it_is() -> None:
    curve = downsampled(np.array([1.0, 2.0, 3.0]), np.array([0.5, math.nan, 0.25]), 10)
    assert curve.steps_B.tolist() == [1.0, 3.0], "a value that is not finite has no place on a curve"
    assert curve.means_B.tolist() == curve.lows_B.tolist() == [0.5, 0.25]


def test_points_of_a_long_curve_are_means_with_their_range() -> None:
    curve = downsampled(np.arange(1.0, 8.0), np.array([1.0, 3.0, 2.0, 4.0, 9.0, 0.0, 5.0]), 3)
    assert curve.steps_B.tolist() == [1.5, 3.5, 6.0], "two, two and three steps"
    assert curve.means_B.tolist() == pytest.approx([2.0, 3.0, 14 / 3])
    assert (curve.lows_B.tolist(), curve.highs_B.tolist()) == ([1.0, 2.0, 0.0], [3.0, 4.0, 9.0])
    values = np.random.default_rng(0).normal(size=MAX_POINTS * 8)
    curve = downsampled(np.arange(len(values)) + 1.0, values, MAX_POINTS)
    assert (len(curve.means_B), curve.means_B.mean()) == (MAX_POINTS, pytest.approx(values.mean()))
    assert (curve.lows_B.min(), curve.highs_B.max()) == (values.min(), values.max())


def test_curves_grow_with_their_file(tmp_path: Path) -> None:
    sink, curves = JsonlSink(tmp_path), Curves(tmp_path)
    curves.refresh()
    assert (curves.names, curves.last_step) == ([], 0)
    for step in (1, 2):
        sink.write(step, {"reward": step / 2} | ({"accuracy/dev": 0.5} if step == 2 else {}))
        curves.refresh()
    assert curves.names == ["reward", "accuracy/dev"]
    assert curves.curve("reward").means_B.tolist() == [0.5, 1.0]
    assert curves.curve("accuracy/dev").steps_B.tolist() == [2.0]


def test_a_resumed_run_drops_what_it_takes_again(tmp_path: Path) -> None:
    sink, curves = JsonlSink(tmp_path), Curves(tmp_path)
    for step in (1, 2, 3):
        sink.write(step, {"reward": float(step)})
    curves.refresh()
    JsonlSink(tmp_path, resume_step=1).write(2, {"reward": 7.0})
    curves.refresh()
    assert (curves.curve("reward").means_B.tolist(), curves.last_step) == ([1.0, 7.0], 2)
    (tmp_path / "metrics.jsonl").write_text("oops\n")
    with pytest.raises(DataError, match=r"metrics\.jsonl line 1 is 'oops'"):
        Curves(tmp_path).refresh()
