"""Short runs with engines of other packages: settings that keep them short, and steps to wait for."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from fovea.metrics.log import read_metrics
from tests.runs import ROOT, environment, untimed

QUICK = ("warmup=null", "evaluate.image_controls=false", "environment.test_size=4", "checkpoint.every_steps=2")
# random weights give no right answer, and the entropy bonus trains along with groups that are all wrong
TRAINS = ("algorithm.entropy_coef=0.1", "algorithm.max_groups_without_signal=4")
APART = ("cluster.placement=disaggregated", "cluster.rollout_gpus=1")
"""An engine in a process that does not train."""
LIMIT_SECONDS = 900
"""Ends a test that hangs, on a machine that is busy with others."""


def train(recipe: str, run_dir: Path, *settings: str, processes: int = 1, env: Mapping[str, str] | None = None) -> None:
    """A run to its end; torchrun starts several processes."""
    launch = ["torch.distributed.run", f"--nproc-per-node={processes}", "-m"] if processes > 1 else []
    done = subprocess.run(
        [sys.executable, "-m", *launch, "fovea", "train", f"recipes/{recipe}.yaml", f"run_dir={run_dir}", *settings],
        cwd=ROOT,
        env=env or environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert "Traceback" not in done.stderr


def heed_ctrl_c() -> None:
    """Undo what a shell does to the signals of a suite that runs in the background, and a child would inherit."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def comparable(run_dir: Path) -> list[dict[str, float]]:
    """Metrics but for times, for what depends on the number of processes, and for differences that are rounding."""
    sent = ("transfer/images", "transfer/requests", "transfer/engines")
    left_out = (*sent, "balance/", "mismatch", "weights_checksum", "reused")
    return [{key: x for key, x in row.items() if not key.startswith(left_out)} for row in untimed(run_dir)]


def check_exact(run_dir: Path, engine: str, steps: int) -> None:
    """That a run has passed the parity gate and taken these steps, with log-probs that are those of the trainer."""
    parity = json.loads((run_dir / "parity.json").read_text(encoding="utf-8"))
    assert (parity["engine"], parity["passed"]) == (engine, True)
    taken = read_metrics(run_dir)
    assert [row["step"] for row in taken] == list(range(1, steps + 1))
    # float32 on both sides: two orders of summation, and nothing else; absent in a step without actions to train on
    assert all(row.get("mismatch/kl", 0.0) < 1e-9 for row in taken)
    assert all(row.get("mismatch/max", 0.0) < 2e-5 for row in taken)
