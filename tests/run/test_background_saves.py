"""Checkpoints that are written while the run goes on: exact as of their step, one at a time, their errors not lost."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from pathlib import Path
from time import perf_counter

import pytest

from fovea.errors import TrainError
from fovea.loop import train
from fovea.metrics.log import read_metrics
from fovea.run import lifecycle
from fovea.run.checkpoint import Checkpoints
from fovea.types import Batch, Metrics
from tests.fakes import BanditPolicy, bandit_run, run_with

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
def test_a_run_that_fails_amid_a_save_says_that_and_leaves_whole_checkpoints(
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
def test_a_save_that_never_ends_does_not_hold_up_the_end(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second signal is not waited for at all; what is left of the save is cleared away on resume."""
    monkeypatch.setattr(lifecycle, "ENDING_SECONDS", 0.5 if isinstance(error, TrainError) else 2 * PATIENCE_SECONDS)
    policy = StuckPolicy()
    policy.error = error
    start = perf_counter()
    with pytest.raises(type(error)):
        train(run_with(policy, tmp_path))
    assert perf_counter() - start < PATIENCE_SECONDS
    assert Checkpoints(tmp_path, keep=2).resume() is None
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_remains_that_another_thread_deletes_at_the_same_time_are_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
