"""The figures of the benchmark of overlap, from rows of metrics."""

from __future__ import annotations

import pytest

from benchmarks.overlap import figures


def test_each_side_waits_for_the_other_where_they_take_turns() -> None:
    row = {"seconds/step": 1.0, "seconds/rollout": 0.5, "seconds/update": 0.3, "seconds/sync": 0.1, "seconds/push": 0.1}
    found = figures([row])
    assert found["policy idle"] == 0.5
    assert found["engine idle"] == pytest.approx(0.4)
    assert found["staleness"] == 0


def test_where_they_overlap_the_waiting_is_measured_and_the_median_taken() -> None:
    row = {"seconds/step": 1.0, "seconds/rollout": 0.9, "seconds/update": 0.7, "seconds/sync": 0.1, "staleness/mean": 1}
    rows = [row | {"seconds/idle_update": x, "seconds/idle_rollout": x / 2} for x in (0.1, 0.2, 9.0)]
    found = figures(rows)
    assert (found["policy idle"], found["engine idle"], found["staleness"]) == (0.2, 0.1, 1)
