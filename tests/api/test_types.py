"""The public API as a type checker sees it, from outside the package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
USER = """
from collections.abc import Sequence

import fovea
from PIL.Image import Image


def reward(task: fovea.Task, text: str, images: Sequence[Image]) -> dict[str, float]:
    return {"right": float(task.answer in text)}


trainer = fovea.GRPO(model="folder", rows=[{"image": b"", "question": "?"}], reward=reward, max_steps=3, warmup=None)
run: fovea.TrainedRun = trainer.train()
steps: int = len(run.metrics)
accuracy: float = trainer.evaluate("majority")[0].accuracy.mean
difference: float = fovea.export(run, "out").max_logprob_difference
fovea.PPO(model={"tiny": {}}, algorithm={"ppo_epochs": 2})
"""
WRONG = """
import fovea

fovea.GRPO(modle="folder")
fovea.GRPO(model="folder", max_steps="three")
fovea.GRPO(model="folder").train().metricks
fovea.trian
"""


@pytest.mark.slow
def test_a_type_checker_knows_the_api(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(USER)
    (tmp_path / "wrong.py").write_text(WRONG)
    # by the settings and the cache of `make lint`: without it, all of torch is read again
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-error-summary", str(tmp_path / "user.py"), str(tmp_path / "wrong.py")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stdout.splitlines()
    errors = [Path(line.partition(": error: ")[0]).name for line in lines if ": error: " in line]
    assert errors == [f"wrong.py:{line}" for line in (4, 5, 6, 7)], done.stdout + done.stderr
