"""Short runs with engines of other packages: settings that keep them short, and steps to wait for."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from fovea.metrics.log import read_metrics
from tests.runs import untimed

QUICK = ("warmup=null", "evaluate.image_controls=false", "environment.test_size=4", "checkpoint.every_steps=2")
# random weights give no right answer, and the entropy bonus trains along with groups that are all wrong
TRAINS = ("algorithm.entropy_coef=0.1", "algorithm.max_groups_without_signal=4")
LIMIT_SECONDS = 360


def wait_for_steps(run_dir: Path, steps: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while len(rows(run_dir)) < steps:
        assert process.poll() is None, "the run ended before it was killed"
        assert time.monotonic() < deadline, "the steps were not taken"
        time.sleep(0.01)


def rows(run_dir: Path) -> Sequence[dict[str, float]]:
    return read_metrics(run_dir) if (run_dir / "metrics.jsonl").exists() else []


def children_of(process: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def comparable(run_dir: Path) -> list[dict[str, float]]:
    """Metrics but for times, for what depends on the number of processes, and for differences that are rounding."""
    left_out = (
        "transfer/images",
        "transfer/requests",
        "transfer/engines",
        "balance/",
        "rollout_train",
        "weights_checksum",
        "reused",
    )
    return [{key: x for key, x in row.items() if not key.startswith(left_out)} for row in untimed(run_dir)]


def check_exact(run_dir: Path, engine: str, steps: int) -> None:
    """That a run has passed the parity gate and taken these steps, with log-probs that are those of the trainer."""
    parity = json.loads((run_dir / "parity.json").read_text(encoding="utf-8"))
    assert (parity["engine"], parity["passed"]) == (engine, True)
    taken = read_metrics(run_dir)
    assert [row["step"] for row in taken] == list(range(1, steps + 1))
    # float32 on both sides: two orders of summation, and nothing else; absent in a step without actions to train on
    assert all(row.get("rollout_train_kl", 0.0) < 1e-9 for row in taken)
    assert all(row.get("rollout_train_max", 0.0) < 2e-5 for row in taken)
