"""A run that draws with two real servers."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from fovea.metrics.log import read_metrics
from tests.rollout.engine_suite import TOLERANCE
from tests.rollout.serve_command import KEY, KEY_ENV
from tests.rollout.vllm.sites import Site, two_servers
from tests.runs import ROOT, command, environment


def settings(site: Site) -> list[str]:
    """Settings of a short run with these servers."""
    urls = ", ".join(each.url for each in site.servers)
    engine = [
        "rollout.engine=vllm_servers",
        f"rollout.engine.servers=[{urls}]",
        f"rollout.engine.weights_dir={site.weights}",
        f"rollout.engine.api_key_env={KEY_ENV}",
    ]
    model = ["model.tiny=null", f"model.path={site.model}", "warmup=null", "data.max_prompt_tokens=400"]
    rows = ["environment.train_size=64", "environment.dev_size=8", "environment.test_size=8", "evaluate.dev_size=8"]
    steps = ["max_steps=2", "rollout.max_new_tokens=8", "rollout.prompts_per_step=4", "evaluate.image_controls=false"]
    return [*engine, *model, *rows, *steps]


def test_a_run_trains_with_servers(tmp_path: Path) -> None:
    """The parity gate, two steps with a push each, and evaluations."""
    with two_servers(tmp_path) as site:
        done = subprocess.run(
            command("train", "recipes/shapes.yaml", f"run_dir={tmp_path / 'run'}", *settings(site)),
            cwd=ROOT,
            env=environment() | {KEY_ENV: KEY},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    assert done.returncode == 0, done.stderr + done.stdout
    parity = json.loads((tmp_path / "run" / "parity.json").read_text(encoding="utf-8"))
    assert (parity["engine"], parity["passed"]) == ("vllm_servers", True)
    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2]
    # float32 on both sides: two orders of summation, and nothing else
    assert max(row["rollout_train_max"] for row in rows) < TOLERANCE
    assert KEY not in "".join(
        file.read_text(errors="replace") for file in (tmp_path / "run").rglob("*") if file.is_file()
    )
