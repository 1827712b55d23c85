"""Files of shards against torch.distributed.checkpoint's own writer and reader, and what a save costs in memory."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from fovea.errors import TrainError
from fovea.train.ranks import ALONE
from fovea.train.torch.checkpoint import SavedShards, StagedShards
from tests.runs import ROOT, environment
from tests.saved import saved_tensors


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "matrix": torch.randn(6, 4, generator=generator),
        "transposed": torch.randn(3, 5, generator=generator).T,
        "vector": torch.randn(7, generator=generator).bfloat16(),
        "count": torch.tensor(3.0),
    }


def assert_same(found: dict[str, torch.Tensor]) -> None:
    assert found.keys() == tensors().keys()
    for name, tensor in tensors().items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)


def test_torchs_own_reader_reads_them(tmp_path: Path) -> None:
    StagedShards.of(tensors(), ALONE).write(tmp_path / "trainable", 0)
    assert_same(saved_tensors(tmp_path / "trainable"))


def test_those_of_torchs_own_writer_are_read(tmp_path: Path) -> None:
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path), save_distributed=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it writes in one process
        dcp.save({name: x.contiguous() for name, x in tensors().items()}, storage_writer=writer, no_dist=True)
    found = {name: torch.zeros_like(x) for name, x in tensors().items()}
    SavedShards(tmp_path).copy_into(found)
    assert_same(found)


def test_a_copy_is_not_changed_by_what_follows(tmp_path: Path) -> None:
    live = tensors()
    staged = StagedShards.of(live, ALONE)
    for tensor in live.values():
        tensor.zero_()
    staged.write(tmp_path / "trainable", 0)
    assert_same(saved_tensors(tmp_path / "trainable"))


@pytest.mark.parametrize("missing", [0, 1])
def test_a_file_of_shards_that_is_missing_is_seen(missing: int, tmp_path: Path) -> None:
    """Of the tensor [6, 4] in three parts; without the last one, nothing tells but the shape."""
    for rank, rows in enumerate(tensors()["matrix"].split(2)):
        StagedShards(shards={"matrix": rows.clone()}, offsets={"matrix": [2 * rank, 0]}).write(tmp_path, rank)
    assert SavedShards(tmp_path).shapes == {"matrix": (6, 4)}
    (tmp_path / f"rank-{missing:05}.safetensors").unlink()
    with pytest.raises(TrainError, match=r"cannot be read \(shards of matrix are missing\)"):
        SavedShards(tmp_path)


def test_a_folder_that_this_machine_does_not_see_is_no_damaged_one(tmp_path: Path) -> None:
    """As on a second machine without the shared disk: its message must not have checkpoints deleted."""
    with pytest.raises(TrainError, match=r"step-1: no such folder on .*; put run_dir where all machines"):
        SavedShards(tmp_path / "step-1" / "trainable")
    with pytest.raises(TrainError, match=r"cannot be read \(trainable has no shards\); delete its folder"):
        SavedShards(tmp_path / "trainable")


MEASURE = """
import sys, threading, time
from pathlib import Path
import torch
from fovea.metrics.log import peak_rss_gib
from fovea.train.ranks import ALONE
from fovea.train.torch.checkpoint import StagedShards

tensors = {str(index): torch.randn(8 * 2**20) for index in range(8)}
before, pauses, done = peak_rss_gib(), [], threading.Event()

def count() -> None:
    last = time.perf_counter()
    while not done.is_set():
        time.sleep(0.001)
        now = time.perf_counter()
        pauses.append(now - last)
        last = now

staged = StagedShards.of(tensors, ALONE)
other = threading.Thread(target=count)
other.start()
start = time.perf_counter()
staged.write(Path(sys.argv[1]), 0)
seconds = time.perf_counter() - start
done.set()
other.join()
print(peak_rss_gib() - before, len(pauses), seconds)
"""


def test_a_save_needs_one_copy_in_host_memory_and_lets_python_go_on(tmp_path: Path) -> None:
    """Of 256 MiB; torch's own writer of this format takes three copies, and no other thread runs meanwhile."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path)],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    gib, runs_of_the_other, _seconds = map(float, done.stdout.split())
    assert 0.9 * 0.25 < gib < 1.1 * 0.25
    assert runs_of_the_other > 5
