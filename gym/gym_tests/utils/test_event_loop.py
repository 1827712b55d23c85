"""Coroutines from ordinary code, work ahead, loops that stop within a watched call, and child processes."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import psutil
import pytest

from fovea_gym.processes.child import ChildProcess
from fovea_gym.utils.event_loop import BackgroundLoop, Prefetch, gather_or_cancel, wait_for
from gym_tests.tables import table


def test_ctrl_c_is_raised_once_and_not_logged_for_every_task(caplog: pytest.LogCaptureFixture) -> None:
    async def press_ctrl_c() -> None:
        raise KeyboardInterrupt

    async def several() -> None:
        await asyncio.gather(*(press_ctrl_c() for _ in range(3)), asyncio.sleep(10))

    with pytest.raises(KeyboardInterrupt):
        wait_for(several())
    gc.collect()
    assert caplog.records == []


@table(("gather", "ended_within"), [(asyncio.gather, []), (lambda *tasks: gather_or_cancel(tasks), ["slow"])])
def test_what_an_error_leaves_pending_has_ended_when_it_is_raised(
    gather: Callable[..., Any], ended_within: list[str]
) -> None:
    ended: list[str] = []

    async def slow() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            ended.append("slow")

    async def fails() -> None:
        await asyncio.sleep(0)
        raise ValueError("the second of two")

    async def both() -> None:
        try:
            await gather(slow(), fails())
        finally:
            assert ended == ended_within

    with pytest.raises(ValueError, match="the second of two"):
        wait_for(both())
    assert ended == ["slow"]


def test_gather_or_cancel_returns_the_results_in_order() -> None:
    async def after(turns: int) -> int:
        for _ in range(turns):
            await asyncio.sleep(0)
        return turns

    assert wait_for(gather_or_cancel(after(turns) for turns in (3, 1, 2))) == [3, 1, 2]


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
    loop = BackgroundLoop("tested")
    for _ in range(2):
        assert loop.wait(asyncio.sleep(0, result=1)) == 1
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
    await asyncio.sleep(3)

async def call(body):
    with watch.calling():
        print("called", flush=True)
        await body()

async def block_after_a_call():
    await call(lambda: asyncio.sleep(0))
    time.sleep(3)

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
        time.sleep(3)
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


SECONDS = 30.0


def blocked() -> tuple[threading.Event, Callable[[], int]]:
    """An event, and work that waits for it."""
    event = threading.Event()

    def work() -> int:
        assert event.wait(SECONDS)
        return 0

    return event, work


def test_results_and_errors_come_to_who_takes_them() -> None:
    ahead: Prefetch[str, float] = Prefetch(2, "test")
    ahead.begin({"half": lambda: 1 / 2, "error": lambda: 1 / 0})
    futures = dict(ahead.ahead)
    assert futures["half"].result(SECONDS) == 0.5
    assert isinstance(futures["error"].exception(SECONDS), ZeroDivisionError)
    half, error = ahead.take("half"), ahead.take("error")
    assert half is not None
    assert half() == 0.5
    assert error is not None
    with pytest.raises(ZeroDivisionError):
        error()
    assert ahead.take("half") is None, "taken before"


def test_what_is_not_begun_is_left_to_the_caller_and_what_is_dropped_never_runs() -> None:
    event, work = blocked()
    ran: list[str] = []
    ahead: Prefetch[str, int] = Prefetch(1, "test")
    ahead.begin({"first": work, "second": lambda: ran.append("second") or 0, "third": lambda: ran.append("third") or 0})
    assert ahead.take("second") is None, "the only thread is on the first"
    ahead.begin({"fourth": lambda: 4})
    assert set(ahead.ahead) == {"fourth"}, "no more is kept than was asked for last"
    event.set()
    assert ahead.ahead["fourth"].result(SECONDS) == 4
    assert ran == []


def test_threads_end_with_their_owner() -> None:
    ahead: Prefetch[str, int] = Prefetch(3, "ends-with-owner")
    ahead.begin({"one": lambda: 1})
    del ahead
    gc.collect()
    deadline = time.monotonic() + SECONDS
    while any(thread.name == "ends-with-owner" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_child_whose_watcher_cannot_start_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    before = set(psutil.Process().children())
    # the watcher's interpreter
    monkeypatch.setattr(sys, "executable", str(tmp_path / "missing"))
    with pytest.raises(FileNotFoundError):
        ChildProcess(command, os.environ)
    assert set(psutil.Process().children()) <= before


def test_a_process_that_has_the_id_of_a_child_that_ended_is_left_alone() -> None:
    child = ChildProcess([sys.executable, "-c", ""], os.environ)
    assert child.wait() == 0
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as other:
        # as if the kernel had given it the id, which no member of the child's group has any more
        child._process.pid = other.pid
        child.close({other.pid})
        assert other.poll() is None
        other.kill()
