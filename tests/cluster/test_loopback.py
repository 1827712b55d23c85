"""What a run of one machine starts listens on loopback alone."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

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
OF_RAY = """
from fovea.cluster.loopback import own_ray_on_loopback
from fovea.cluster.ray_token import make_token, use_token
make_token()
use_token()
own_ray_on_loopback()

import ray
from fovea.cluster.ray import ANSWERS, RayWorker, connect
from fovea.config.cluster import Cluster

assert connect(Cluster(gpus_per_node=1))
actor = ray.remote(concurrency_groups={ANSWERS: 1})(RayWorker).remote()
host, port = ray.get(actor.meeting_point.remote())
me = psutil.Process()
print(json.dumps([host, *listening(me, *me.children(recursive=True))]))
ray.shutdown()
"""


def test_process_groups_under_torchrun(tmp_path: Path) -> None:
    """By the interface, too: where a machine's name is of loopback, gloo listens there by itself.

    torchrun's own store is in a process of its own.
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


@pytest.mark.slow
def test_ray_and_the_meeting_point_of_its_workers() -> None:
    pytest.importorskip("ray", reason="needs the extra ray")
    with tempfile.TemporaryDirectory(prefix="fv") as folder:
        own = {"RAY_TMPDIR": folder, "RAY_AUTH_TOKEN_PATH": f"{folder}/token", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", LISTENING + OF_RAY],
            env=environment() | own,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == ["127.0.0.1", "127.0.0.1"]
