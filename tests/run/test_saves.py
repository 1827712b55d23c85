"""Saves in the background, on a disk that fills up, and of micro-batches that had to become smaller."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from time import perf_counter

import numpy as np
import pytest
import torch

from fovea.errors import MicrobatchMemoryError, TrainError
from fovea.loop import train
from fovea.metrics.log import read_metrics
from fovea.run import lifecycle
from fovea.run.checkpoint import Checkpoints, folder_bytes, room_for
from fovea.run.lifecycle import begin
from fovea.train.ranks import ALONE
from fovea.train.torch.checkpoint import StagedShards
from fovea.types import Batch, Metrics
from fovea_gym.utils.event_loop import wait_for
from tests.fakes import BanditPolicy, bandit_run, printed_in, run_with
from tests.runs import arguments, fovea, run_program, untimed

LAST = 30
PATIENCE_SECONDS = 20.0


class SlowPolicy(BanditPolicy):
    """Its files are written some updates after they were staged, as far as there are so many."""

    def __init__(self, delay: int = 3) -> None:
        super().__init__()
        self.delay = delay
        self.staged: tuple[Path, str, int] | None = None

    async def save(self, folder: Path) -> None:
        assert self.staged is None, "two checkpoints at once"
        self.staged = folder / "table.json", json.dumps([self.table.tolist(), self.updates]), self.updates

    async def finish_save(self) -> None:
        assert self.staged is not None
        file, text, updates = self.staged
        async with asyncio.timeout(PATIENCE_SECONDS):
            while self.updates < min(updates + self.delay, LAST):
                await asyncio.sleep(0)
        file.write_text(text)
        self.staged = None


def saved(folder: Path, step: int) -> tuple[object, object]:
    checkpoint = folder / "checkpoints" / f"step-{step}"
    state = json.loads((checkpoint / "state.json").read_text())
    for key in ("rl_seconds", "earlier_seconds", "warmup_seconds"):
        del state["train_state"][key]
    return json.loads((checkpoint / "table.json").read_text()), state


def test_steps_go_on_while_a_checkpoint_of_an_earlier_one_is_written(tmp_path: Path) -> None:
    every = {"every_steps": 2, "keep": 100}
    train(bandit_run(tmp_path / "waiting", checkpoint={**every, "background": False}))
    train(run_with(SlowPolicy(delay=1), tmp_path / "beside", checkpoint=every))
    steps = sorted(int(path.name.removeprefix("step-")) for path in (tmp_path / "beside" / "checkpoints").iterdir())
    assert steps == list(range(0, LAST + 1, 2))
    for step in steps:
        assert saved(tmp_path / "beside", step) == saved(tmp_path / "waiting", step)


def test_the_times_of_checkpoints_are_metrics(tmp_path: Path) -> None:
    train(run_with(SlowPolicy(), tmp_path))
    rows = read_metrics(tmp_path)
    # the first step waited for that of step 0, and the others are saved after steps 10 and 20
    assert [row["step"] for row in rows if "seconds/checkpoint" in row] == [1, 11, 21]
    first, second = [row["step"] for row in rows if "seconds/checkpoint_write" in row][:2]
    assert 3 < first <= 11, "written while steps went on, and awaited by the save of step 10"
    assert 13 < second <= 21


class FullDiskPolicy(BanditPolicy):
    async def finish_save(self) -> None:
        if self.updates >= 10:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("background", [True, False])
def test_a_disk_that_fills_up_in_the_background_ends_the_run_with_the_fix(background: bool, tmp_path: Path) -> None:
    settings = {"checkpoint": {"every_steps": 5, "background": background}}
    full = r"checkpoint of step 10 could not be written \(No space left on device\): it needs about .* resume=auto"
    with pytest.raises(TrainError, match=full):
        train(run_with(FullDiskPolicy(), tmp_path / "full", **settings))
    assert len(read_metrics(tmp_path / "full")) < 15, "it went on for steps that would be lost"
    assert {path.name for path in (tmp_path / "full" / "checkpoints").iterdir()} == {"step-0", "step-5"}
    train(bandit_run(tmp_path / "full", resume=True, **settings))
    train(bandit_run(tmp_path / "whole", **settings))
    assert saved(tmp_path / "full", LAST) == saved(tmp_path / "whole", LAST)


def test_an_error_of_the_last_checkpoint_is_raised_too(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match="checkpoint of step 12 could not be written"):
        train(run_with(FullDiskPolicy(), tmp_path, max_steps=12, checkpoint={"every_steps": 0}))


class FailingPolicy(SlowPolicy):
    async def update(self, batch: Batch) -> Metrics:
        if self.updates == 11:
            self.updates = LAST  # lets the writing go on
            raise TrainError("an update failed")
        return await super().update(batch)


class FailingOnFullDiskPolicy(FullDiskPolicy):
    async def update(self, batch: Batch) -> Metrics:
        if self.updates == 10:
            raise TrainError("an update failed")
        return await super().update(batch)


@pytest.mark.parametrize(("policy", "newest"), [(FailingPolicy, 10), (FailingOnFullDiskPolicy, 0)])
def test_a_failure_amid_a_save_leaves_whole_checkpoints(
    policy: type[BanditPolicy], newest: int, tmp_path: Path
) -> None:
    with pytest.raises(TrainError, match="an update failed"):
        train(run_with(policy(), tmp_path))
    found = Checkpoints(tmp_path, keep=2).latest()
    assert found is not None
    assert found.step == newest


class StuckPolicy(BanditPolicy):
    error: BaseException = TrainError("an update failed")

    async def finish_save(self) -> None:
        await asyncio.sleep(2 * PATIENCE_SECONDS)

    async def update(self, batch: Batch) -> Metrics:
        if self.updates == 5:
            raise self.error
        return await super().update(batch)


@pytest.mark.parametrize("error", [TrainError("an update failed"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
def test_an_endless_save_holds_up_no_end(error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second signal is not waited for at all; what is left of the save is cleared away on resume."""
    monkeypatch.setattr(lifecycle, "ENDING_SECONDS", 0.5 if isinstance(error, TrainError) else 2 * PATIENCE_SECONDS)
    policy = StuckPolicy()
    policy.error = error
    start = perf_counter()
    with pytest.raises(type(error)):
        train(run_with(policy, tmp_path))
    assert perf_counter() - start < PATIENCE_SECONDS
    assert (Checkpoints(tmp_path, keep=2).resume(), list((tmp_path / "checkpoints").iterdir())) == (None, [])


def test_remains_that_another_thread_deletes_are_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remains = tmp_path / "checkpoints" / ".step-0.partial"
    remains.mkdir(parents=True)
    unlink = os.unlink

    def unlink_twice(path: str, *, dir_fd: int | None = None) -> None:
        unlink(path, dir_fd=dir_fd)
        unlink(path, dir_fd=dir_fd)

    (remains / "state.json").touch()
    monkeypatch.setattr(os, "unlink", unlink_twice)
    assert Checkpoints(tmp_path, keep=2).resume() is None
    assert not remains.exists()


MIB = 2**20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    if run_program(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk]).returncode:
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


def test_a_save_that_will_not_fit_is_not_begun_and_room_lets_the_run_go_on(small_disk: Path, tmp_path: Path) -> None:
    train(run_with(LargePolicy(), tmp_path / "whole"))
    folder, ballast = small_disk / "run", small_disk / "ballast"
    ballast.write_bytes(bytes(2 * MIB + MIB // 2))
    no_room = r"no room for the checkpoint of step 10: it needs about 1\.0 MiB, and 0\.\d MiB are free in "
    with pytest.raises(TrainError, match=rf"{no_room}{folder}/checkpoints; make room there and continue with resume="):
        train(run_with(LargePolicy(), folder))
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-0"]
    ballast.unlink()
    train(run_with(LargePolicy(), folder, resume=True))
    assert untimed(folder) == untimed(tmp_path / "whole")


def test_a_disk_that_fills_up_amid_a_save_leaves_no_half(small_disk: Path) -> None:
    (small_disk / "ballast").write_bytes(bytes(3 * MIB + MIB // 2))
    with pytest.raises(TrainError, match=r"checkpoint of step 0 could not be written \(No space left on device\): it"):
        train(run_with(LargePolicy(), small_disk / "run"))
    assert list((small_disk / "run" / "checkpoints").iterdir()) == []


class Filling(BanditPolicy):
    ballast: Path

    async def update(self, batch: Batch) -> Metrics:
        if self.updates == 12:
            with suppress(OSError), self.ballast.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(512))
        return await super().update(batch)


def test_a_disk_that_fills_up_between_saves_ends_the_run_until_room_is_made(small_disk: Path, tmp_path: Path) -> None:
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


def test_a_folder_is_as_large_as_its_files_and_other_errors_of_a_save_keep_their_own_words(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "a.json").write_text(json.dumps([1, 2]))
    (tmp_path / "b").write_bytes(np.zeros(3).tobytes())
    assert folder_bytes(tmp_path) == 6 + 24
    with pytest.raises(RuntimeError, match=r"^other$"), room_for("it", tmp_path, 0):
        raise RuntimeError("other")


SETTING = 1000
TRAIN = {"max_tokens_per_microbatch": SETTING}


class SmallMemoryPolicy(BanditPolicy):
    """Its twelfth update has room for half a micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.max_tokens = SETTING

    async def limit_microbatches(self, max_tokens: int) -> None:
        self.max_tokens = self.limited_to = max_tokens

    async def update(self, batch: Batch) -> Metrics:
        metrics = await super().update(batch)
        if self.updates == 12 and self.max_tokens == SETTING:
            await self.run_out()
        return metrics | {"microbatch/max_tokens": float(self.max_tokens)}

    async def run_out(self) -> None:
        self.max_tokens = SETTING // 2


class OneOfSeveral(SmallMemoryPolicy):
    next_max_tokens = SETTING // 2

    async def run_out(self) -> None:
        raise MicrobatchMemoryError("memory ran out on rank 1", self.next_max_tokens)


class BesideEngine(OneOfSeveral):
    """One of several ranks, whose memory ran out beside the engine's: the same limit will do."""

    next_max_tokens = SETTING


def ran_out(folder: Path, policy: type[OneOfSeveral] = OneOfSeveral) -> None:
    with pytest.raises(MicrobatchMemoryError):
        train(run_with(policy(), folder, train=TRAIN))


def test_a_resumed_run_has_the_micro_batches_of_one_that_was_not_stopped(tmp_path: Path) -> None:
    train(run_with(SmallMemoryPolicy(), tmp_path / "whole", train=TRAIN))
    train(run_with(SmallMemoryPolicy(), tmp_path / "stopped", train=TRAIN, max_steps=15))
    train(run_with(SmallMemoryPolicy(), tmp_path / "stopped", resume=True, train=TRAIN))
    sizes = [[row["microbatch/max_tokens"] for row in read_metrics(tmp_path / name)] for name in ("stopped", "whole")]
    assert sizes[0] == sizes[1] == [SETTING] * 11 + [SETTING / 2] * 19


@pytest.mark.parametrize(("policy", "left"), [(OneOfSeveral, SETTING / 2), (BesideEngine, SETTING)])
def test_a_rank_without_memory_leaves_a_size_for_the_next(
    policy: type[OneOfSeveral], left: float, tmp_path: Path
) -> None:
    ran_out(tmp_path, policy)
    next_attempt = run_with(policy(), tmp_path, resume=True, train=TRAIN, max_steps=11)
    train(next_attempt)
    assert vars(next_attempt.policy)["limited_to"] == left
    assert [row["microbatch/max_tokens"] for row in read_metrics(tmp_path)] == [SETTING] * 10 + [left]


LIMITED = f"micro-batches have {SETTING // 2} tokens at most, since memory ran out before this resume; set train.max"
FREED = "the KV cache is freed before every update, since memory ran out before this resume"


@pytest.mark.parametrize(
    ("policy", "engine", "printed"),
    [
        (OneOfSeveral, "embedded", [LIMITED, FREED]),
        (OneOfSeveral, "vllm", [LIMITED]),
        (BesideEngine, "embedded", [FREED]),
        (BesideEngine, "vllm", []),
    ],
)
def test_a_resume_prints_what_changes_after_memory_ran_out(
    policy: type[OneOfSeveral], engine: str, printed: list[str], tmp_path: Path
) -> None:
    ran_out(tmp_path, policy)
    resumed = run_with(policy(), tmp_path, resume=True, train=TRAIN, rollout={"engine": {"name": engine}})
    lines = printed_in(resumed)
    wait_for(begin(resumed))
    found = [line for line in lines if line.endswith("before this resume") or "tokens at most" in line]
    assert [line.startswith(start) for line, start in zip(found, printed, strict=True)] == [True] * len(printed)


def test_another_setting_is_a_new_beginning(tmp_path: Path) -> None:
    ran_out(tmp_path)
    policy = OneOfSeveral()
    policy.max_tokens = 2 * SETTING
    train(run_with(policy, tmp_path, resume=True, train={"max_tokens_per_microbatch": 2 * SETTING}))
    assert {row["microbatch/max_tokens"] for row in read_metrics(tmp_path)[10:]} == {2 * SETTING}
    assert len(read_metrics(tmp_path)) == 30
