"""Coroutines from ordinary code, how they end, and event loops that stop within a watched call."""

from __future__ import annotations

import asyncio
import gc
import signal
import subprocess
import sys
import time
from pathlib import Path
from threading import Event

import pytest

from fovea_gym.utils.event_loop import BackgroundLoop, gather_or_cancel, wait_for


async def press_ctrl_c() -> None:
    raise KeyboardInterrupt


async def several() -> None:
    await asyncio.gather(*(press_ctrl_c() for _ in range(3)), asyncio.sleep(10))


def test_ctrl_c_is_raised_once_and_not_logged_for_every_task(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(KeyboardInterrupt):
        wait_for(several())
    gc.collect()
    assert caplog.records == []


def test_a_result_comes_back_and_an_error_as_it_is() -> None:
    async def fail() -> None:
        raise ValueError("so")

    assert wait_for(asyncio.sleep(0, result=3)) == 3
    with pytest.raises(ValueError, match="so"):
        wait_for(fail())


def test_what_an_error_leaves_pending_has_ended_when_it_is_raised() -> None:
    ended: list[str] = []

    async def slow() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            ended.append("slow")

    async def fails() -> None:
        await asyncio.sleep(0)
        raise ValueError("so")

    async def both() -> None:
        await asyncio.gather(slow(), fails())

    with pytest.raises(ValueError, match="so"):
        wait_for(both())
    assert ended == ["slow"]


def test_gather_or_cancel_ends_the_others_before_it_raises() -> None:
    ended: list[str] = []

    async def slow() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("slow")

    async def fails() -> None:
        await asyncio.sleep(0)
        raise ValueError("the second of two")

    async def both() -> list[str]:
        with pytest.raises(ValueError, match="the second of two"):
            await gather_or_cancel([slow(), fails()])
        return list(ended)

    assert asyncio.run(both()) == ["slow"]


def test_gather_or_cancel_returns_the_results_in_order() -> None:
    async def after(turns: int) -> int:
        for _ in range(turns):
            await asyncio.sleep(0)
        return turns

    assert asyncio.run(gather_or_cancel(after(turns) for turns in (3, 1, 2))) == [3, 1, 2]


def test_what_still_runs_on_a_background_loop_is_cancelled_when_it_closes() -> None:
    loop, ended = BackgroundLoop("tested"), Event()

    async def pending() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    async def leave_one() -> asyncio.Task[None]:
        task = asyncio.ensure_future(pending())
        await asyncio.sleep(0)
        return task

    task = loop.wait(leave_one())
    loop.close()
    assert ended.wait(timeout=30)
    assert task.cancelling()


def test_a_background_loop_starts_again_after_its_end() -> None:
    async def one() -> int:
        return 1

    loop = BackgroundLoop("tested")
    assert loop.wait(one()) == 1
    loop.close()
    assert loop.wait(one()) == 1
    loop.close()


SCRIPT = """
import asyncio, ctypes, os, re, sys, threading, time
from fovea_gym.utils.loop_watch import LoopWatch

watch = LoopWatch(2, "error: mine.py:score blocks")

async def backtrack():
    await asyncio.to_thread(re.match, r"(a+)+$", "a" * 40 + "b")

async def sleep_with_the_lock():
    await asyncio.to_thread(ctypes.PyDLL(None).sleep, 600)

async def never_await():
    while True:
        pass

async def wait():
    await asyncio.sleep(4)

async def call(body):
    with watch.calling():
        print("called", flush=True)
        await body()

async def block_after_a_call():
    await call(lambda: asyncio.sleep(0))
    time.sleep(4)

name = sys.argv[1]
asyncio.run(globals()[name]() if name == "block_after_a_call" else call(globals()[name]))
"""


def start(name: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SCRIPT, name]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("name", "line"), [("backtrack", "in match"), ("sleep_with_the_lock", "in run"), ("never_await", "in never_await")]
)
def test_a_call_that_stops_the_loop_ends_the_process_with_code_3_and_its_line(name: str, line: str) -> None:
    with start(name) as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == 3, err
    assert err.startswith("\nerror: mine.py:score blocks\n")
    assert line in err


@pytest.mark.parametrize("name", ["wait", "block_after_a_call"])
def test_a_call_that_waits_and_what_comes_after_it_go_on(name: str) -> None:
    with start(name) as process:
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")


def test_a_stopped_process_goes_on() -> None:
    with start("wait") as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        time.sleep(4)
        process.send_signal(signal.SIGCONT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")


def test_the_watcher_ends_with_its_process() -> None:
    with start("wait") as process:
        assert process.stdout is not None
        process.stdout.readline()
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.kill()
    assert len(children) == 1
    deadline = time.monotonic() + 10
    while Path(f"/proc/{children[0]}").exists():
        assert time.monotonic() < deadline, "left behind"
        time.sleep(0.05)
