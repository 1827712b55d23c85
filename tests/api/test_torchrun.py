"""`torchrun train.py`, a script of the Python API in two processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fovea
from tests.api.small import PHOTOS, SETTINGS, rows, score

ROOT = Path(__file__).parents[2]
SCRIPT = """
import os

import fovea
from tests.api.small import PHOTOS, SETTINGS, rows, score

trainer = fovea.GRPO(rows=rows(), reward=score, environment=PHOTOS, settings={**SETTINGS, "run_dir": "two"})
run = trainer.train()
print("after train, rank", os.environ["RANK"], "steps", len(run.metrics))
trainer.evaluate("gold", quiet=True)
"""


@pytest.mark.slow
def test_a_script_under_torchrun_trains_as_in_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "train.py"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    after = [line for line in done.stdout.splitlines() if line.startswith("after train")]
    assert after == ["after train, rank 0 steps 2"], "the rest of the script runs once"
    two = fovea.load_run("two")
    assert two.summary is not None
    settings = {**SETTINGS, "run_dir": "one", "threads": 1}
    one = fovea.GRPO(rows=rows(), reward=score, environment=PHOTOS, settings=settings).train()
    for mine, theirs in zip(one.metrics, two.metrics, strict=True):
        for name in ("reward", "accuracy", "response_tokens_mean"):
            assert theirs[name] == pytest.approx(mine[name]), name
