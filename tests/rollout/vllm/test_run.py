"""Runs with vLLM in two processes: an engine in each, and rollouts ahead of the updates."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rollout.engines.on_vllm import ENGINE
from tests.rollout.short_runs import APART, QUICK, TRAINS, check_exact, train
from tests.runs import SMALL, untimed


def test_two_processes_draw_with_an_engine_each(tmp_path: Path) -> None:
    train("shapes", tmp_path, *SMALL, *ENGINE.run_settings, "max_steps=2", processes=2)
    check_exact(tmp_path, "vllm", 2)


def test_rollouts_ahead_carry_the_version_that_drew_them(tmp_path: Path) -> None:
    ahead = ("rollout.max_staleness_steps=1", "checkpoint.every_steps=4", "max_steps=4")
    train("shapes", tmp_path, *SMALL, *ENGINE.run_settings, *QUICK, *TRAINS, *APART, *ahead, processes=2)
    rows = untimed(tmp_path)
    assert [row["staleness/mean"] for row in rows] == [0, 1, 1, 1]
    # the engine's log-probs are the old ones, of weights a step behind
    is_exact = [row["ratio_mean"] == pytest.approx(1, abs=1e-5) for row in rows]
    assert is_exact == [True, False, False, False]
