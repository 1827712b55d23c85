"""Real processes whose event loop stops within a watched call, and some where it does not."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = """
import asyncio, ctypes, os, re, sys, threading, time
from fovea.utils.loop_watch import LoopWatch

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
    ("name", "line"),
    [("backtrack", "in match"), ("sleep_with_the_lock", "in run"), ("never_await", "in never_await")],
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
