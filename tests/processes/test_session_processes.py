"""Processes that the sessions of a killed run have left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from fovea.processes.session_processes import MARK, end_left_processes, session_environment
from fovea_gym.processes.ending import running

RUN = """
import subprocess, sys, time
from fovea.processes.session_processes import session_environment
# a session's process with one of its own, in a session that no signal to the run's group reaches
shell, pipe = ["sh", "-c", "sleep 600 & echo $!; wait"], {"stdout": subprocess.PIPE, "text": True}
session = subprocess.Popen(shell, env=session_environment(), start_new_session=True, **pipe)
# in one piece: two processes that write to one pipe may do so amid each other's lines
print(session.stdout.readline() + str(session.pid), flush=True)
time.sleep(600)
"""


@contextmanager
def run() -> Iterator[tuple[subprocess.Popen[str], set[int]]]:
    """A run with a session of two processes, and their ids."""
    process = subprocess.Popen([sys.executable, "-c", RUN], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    session = {int(process.stdout.readline()) for _ in range(2)}
    try:
        yield process, session
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        for pid in session & pids():
            os.kill(pid, signal.SIGKILL)


def pids() -> set[int]:
    return {process.pid for process in running()}


def wait_until(ended: set[int]) -> bool:
    deadline = time.monotonic() + 30
    while ended & pids() and time.monotonic() < deadline:
        time.sleep(0.01)
    return not ended & pids()


def test_processes_of_a_run_that_was_killed_are_ended() -> None:
    with run() as (process, session):
        end_left_processes()
        assert session <= pids(), "those of a run that goes on are left alone"
        process.kill()  # SIGKILL: no handler, no `close`
        # nobody has reaped it yet, as in a container without an init
        assert wait_until({process.pid})
        assert session <= pids()
        assert end_left_processes() >= 2
        assert wait_until(session)


def test_what_is_no_mark_ends_nothing() -> None:
    for mark in ("", "{}", "[1", '{"host": 1, "pid": "x", "started": null}', '{"host": "a", "pid": -1, "started": ""}'):
        environment = {**session_environment(), MARK: mark}
        process = subprocess.Popen(["sleep", "600"], env=environment)
        try:
            end_left_processes()
            assert process.poll() is None, mark
        finally:
            process.kill()
            process.wait()
