"""The gate where transformers makes the positions: a sound run passes, and says which faults it cannot imitate."""

from __future__ import annotations

from pathlib import Path

from fovea.run.parity import read_parity
from fovea.utils.event_loop import wait_for
from tests.wiring.small import run_of


def test_faults_of_positions_cannot_be_told_on_the_plain_path(tmp_path: Path) -> None:
    run = run_of(tmp_path, model={"tiny": {}, "fast_path": "off"}, rollout={"max_new_tokens": 12})
    wait_for(run.weight_sync.push(0))
    reading = wait_for(read_parity(run, 0))
    assert reading.passed
    assert {fault.name for fault in reading.doubtful} == {"two of three M-RoPE rows dropped", "1-D positions"}
