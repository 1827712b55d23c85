"""Memory that really runs out on one of two ranks under torchrun: both end, and the next attempt has smaller rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fovea.errors import MicrobatchMemoryError
from fovea.metrics.log import read_metrics
from tests.cluster.torchrun_runs import settings
from tests.runs import ROOT, environment

pytestmark = pytest.mark.kill

SETTING = 16_000
SCRIPT = """
import os, resource
from contextlib import nullcontext, suppress
from pathlib import Path
from fovea.cli.main import main
from fovea.run import lifecycle
from fovea.train.torch.policy import TorchPolicy

rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
update = TorchPolicy.update

def update_in_little_memory(self, batch):
    # the first update makes them before its passes, in memory of the same size
    self._make_moments()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (2**20, before[1]))
    ballast = []
    try:
        # what earlier phases have freed could be room enough
        with suppress(MemoryError):
            while True:
                ballast.append(bytearray(2**18))
        return update(self, batch)
    finally:
        # a thread that finds no memory before it says that it runs leaves Thread.start() waiting for ever
        resource.setrlimit(resource.RLIMIT_AS, before)

if (rank, attempt) == ("1", "0"):
    TorchPolicy.update = update_in_little_memory
if rank == "0":
    # with NCCL the driver waits in a collective call until torchrun kills it, and leaves nothing
    lifecycle.leaving_limit = lambda *_: nullcontext()
try:
    main()
except SystemExit as ended:
    Path(__file__).with_name(f"code-{rank}-{attempt}").write_text(str(ended.code))
    raise
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit of the address space")
def test_a_rank_without_memory_ends_all_and_the_next_attempt_fits(tmp_path: Path) -> None:
    script, run_dir = tmp_path / "script.py", tmp_path / "run"
    script.write_text(SCRIPT)
    words = [f"train.max_tokens_per_microbatch={SETTING}", "rollout.prompts_per_step=24", "max_steps=2"]
    words += ["warmup=null", "model.freeze_vision_tower=false", "resume=auto"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1"]
    # seconds; with a tenth, as by default, torchrun may kill rank 0 before that has seen rank 1 go
    launcher += ["--monitor-interval=5"]
    done = subprocess.run(
        [*launcher, str(script), "train", *settings("recipes/shapes.yaml", run_dir, *words)],
        cwd=ROOT,
        env=environment() | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    said = " ".join(done.stderr.split())
    assert done.returncode == 0, done.stderr
    assert f"error: memory ran out on rank 1 in a micro-batch of {SETTING} tokens at most" in said
    ended = [(tmp_path / f"code-{rank}-0").read_text() for rank in (0, 1)]
    assert ended == [str(MicrobatchMemoryError.exit_code)] * 2
    left = json.loads((run_dir / "microbatches.json").read_text())
    assert left["setting"] == SETTING > left["limit"]
    sizes = {row["microbatch/max_tokens"] for row in read_metrics(run_dir)}
    assert sizes == {left["limit"]}
