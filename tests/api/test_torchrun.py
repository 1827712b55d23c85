"""`torchrun train.py`, a script of the Python API in two processes."""

from __future__ import annotations

from pathlib import Path

import pytest

import fovea
from tests.api.small import PHOTOS, SETTINGS, rows, score
from tests.cluster.torchrun_runs import run_on


@pytest.mark.slow
def test_a_script_under_torchrun_trains_as_in_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    printed = run_on(2, "tests.api.trained_script", str(tmp_path / "two"))
    after = [line for line in printed.splitlines() if line.startswith("after train")]
    assert after == ["after train, rank 0 steps 2"], "the rest of the script runs once"
    called = [line for line in printed.splitlines() if line.startswith("callback")]
    assert called == ["callback, rank 0 step 1", "callback, rank 0 step 2"]
    two = fovea.load_run("two")
    assert two.summary is not None
    settings = {**SETTINGS, "run_dir": "one", "threads": 1}
    one = fovea.GRPO(rows=rows(), reward=score, environment=PHOTOS, settings=settings).train()
    for mine, theirs in zip(one.metrics, two.metrics, strict=True):
        for name in ("reward", "accuracy", "response_tokens_mean"):
            assert theirs[name] == pytest.approx(mine[name]), name
