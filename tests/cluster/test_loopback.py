"""What a run of one machine starts listens only on loopback."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.runs import ROOT, environment

LISTENING = """
import json
from pathlib import Path
import psutil

def listening(*processes):
    found = [each for process in processes for each in process.net_connections("inet")]
    return sorted({each.laddr.ip.removeprefix("::ffff:") for each in found if each.status == psutil.CONN_LISTEN})
"""
OF_RANK = """
import os
import torch.distributed as dist
from fovea.cluster.torchrun import join

ranks = join(60)
Path(__file__).with_name(f"{ranks.rank}.json").write_text(
    json.dumps([os.environ["GLOO_SOCKET_IFNAME"], *listening(psutil.Process())])
)
dist.barrier()
"""


def test_process_groups_under_torchrun(tmp_path: Path) -> None:
    """By the interface, too: where a machine's name is of loopback, gloo listens there by itself.

    torchrun's own store is in a separate process.
    """
    (tmp_path / "script.py").write_text(LISTENING + OF_RANK)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    subprocess.run(
        [*launcher, str(tmp_path / "script.py")],
        env=environment() | {"PYTHONPATH": str(ROOT)},
        timeout=120,
        check=True,
    )
    for rank in (0, 1):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == ["lo", "127.0.0.1"]
