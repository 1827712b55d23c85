"""A disk that is full: said in one line before a save and amid one, with nothing half left, and no end of the run."""

from __future__ import annotations

import errno
import json
import resource
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from fovea.errors import TrainError
from fovea.loop import train
from fovea.metrics.log import read_metrics
from fovea.run.checkpoint import folder_bytes, room_for
from fovea.run.context import Run
from fovea.train.ranks import ALONE
from fovea.train.torch.checkpoint import StagedShards
from fovea.types import Batch, Metrics
from tests.fakes import BanditPolicy, bandit_run, run_with
from tests.runs import arguments, fovea, untimed

MIB = 2**20
DISK_MIB = 4


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("a file system can only be mounted by root")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_that_fills_up_while_the_model_is_made_is_one_line(small_disk: Path) -> None:
    (small_disk / "ballast").write_bytes(bytes(3 * MIB))
    folder = small_disk / "run"
    done = fovea(*arguments(folder))
    assert (done.returncode, done.stderr) == (2, f"error: {folder}/model: No space left on device\n")
    assert not folder.exists()


class LargePolicy(BanditPolicy):
    """A policy whose checkpoints have a file of a MiB, of which `describe` knows nothing."""

    async def save(self, folder: Path) -> None:
        await super().save(folder)
        (folder / "large").write_bytes(bytes(MIB))


def large_run(folder: Path, *, resume: bool = False) -> Run:
    return run_with(LargePolicy(), folder, resume=resume)


def test_a_save_that_will_not_fit_is_not_begun_and_the_run_goes_on_after_room_was_made(
    small_disk: Path, tmp_path: Path
) -> None:
    train(large_run(tmp_path / "whole"))
    folder, ballast = small_disk / "run", small_disk / "ballast"
    ballast.write_bytes(bytes(2 * MIB + MIB // 2))
    no_room = r"no room for the checkpoint of step 10: it needs about 1\.0 MiB, and 0\.\d MiB are free in "
    with pytest.raises(
        TrainError, match=rf"{no_room}{folder}/checkpoints; make room there and continue with resume=auto"
    ):
        train(large_run(folder))
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-0"]
    ballast.unlink()
    train(large_run(folder, resume=True))
    assert untimed(folder) == untimed(tmp_path / "whole")


def test_a_disk_that_fills_up_amid_a_save_leaves_no_half(small_disk: Path) -> None:
    (small_disk / "ballast").write_bytes(bytes(3 * MIB + MIB // 2))
    with pytest.raises(TrainError, match=r"checkpoint of step 0 could not be written \(No space left on device\): it"):
        train(large_run(small_disk / "run"))
    assert list((small_disk / "run" / "checkpoints").iterdir()) == []


class Filling(BanditPolicy):
    ballast: Path

    async def update(self, batch: Batch) -> Metrics:
        if self.updates == 12:
            with suppress(OSError), self.ballast.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(512))
        return await super().update(batch)


def test_a_disk_that_fills_up_between_saves_ends_the_run_which_goes_on_after_room_was_made(
    small_disk: Path, tmp_path: Path
) -> None:
    """The metrics of a step, or its samples, cannot be written; what was cut off is dropped by the resume."""
    train(bandit_run(tmp_path / "whole"))
    policy, folder = Filling(), small_disk / "run"
    policy.ballast = small_disk / "ballast"
    with pytest.raises(OSError, match="No space left on device") as caught:
        train(run_with(policy, folder))
    assert caught.value.errno == errno.ENOSPC
    assert 10 <= len(read_metrics(folder)) < 20
    (small_disk / "ballast").unlink()
    train(bandit_run(folder, resume=True))
    assert untimed(folder) == untimed(tmp_path / "whole")


def test_the_writer_of_tensors_says_what_the_system_said(tmp_path: Path) -> None:
    shards = StagedShards.of({"weight": torch.zeros(100_000)}, ALONE)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            shards.write(tmp_path / "trainable", 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.errno == errno.EFBIG


def test_other_errors_of_a_save_keep_their_own_words(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"^other$"), room_for("it", tmp_path, 0):
        raise RuntimeError("other")


def test_a_folder_is_as_large_as_its_files(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "a.json").write_text(json.dumps([1, 2]))
    (tmp_path / "b").write_bytes(np.zeros(3).tobytes())
    assert folder_bytes(tmp_path) == 6 + 24
