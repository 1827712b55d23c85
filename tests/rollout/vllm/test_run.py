"""Whole runs that draw with vLLM: the parity gate, a warm-up, steps, evaluations."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.rollout.short_runs import check_exact
from tests.runs import ROOT, SMALL, environment, fovea

VLLM = ["rollout.engine=vllm", "rollout.engine.enforce_eager=true", "rollout.engine.kv_cache_gib=0.25"]


def train(recipe: str, run_dir: Path, *settings: str) -> None:
    done = fovea("train", f"recipes/{recipe}.yaml", f"run_dir={run_dir}", *SMALL, *VLLM, *settings)
    assert done.returncode == 0, done.stderr + done.stdout


def test_two_turns_and_adapters(tmp_path: Path) -> None:
    longest = ["data.max_prompt_tokens=400", "rollout.engine.max_model_len=600"]
    train("shapes_zoom", tmp_path, "max_steps=2", "model.lora.rank=4", *longest)
    check_exact(tmp_path, "vllm", 2)


def test_two_processes_draw_with_an_engine_each(tmp_path: Path) -> None:
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "fovea", "train", "recipes/shapes.yaml"]
    done = subprocess.run(
        [sys.executable, *launch, f"run_dir={tmp_path}", *SMALL, *VLLM, "max_steps=2"],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert "Traceback" not in done.stderr
    check_exact(tmp_path, "vllm", 2)
