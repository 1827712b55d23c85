"""Processes that hang, ranks that never come to a collective call, and what the sessions of a killed run have left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from threading import Event
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from fovea.cluster.placement import Placement, Role
from fovea.cluster.remote import ConnectionLine, RemoteWorker
from fovea.cluster.workers import call_each, lost_ranks
from fovea.errors import LostRankError
from fovea.metrics.log import read_metrics
from fovea.processes.calls import Call
from fovea.processes.heartbeat import BEATS_PER_TIMEOUT, Silence, Watch, beating
from fovea.processes.serving import CallerConnection
from fovea.processes.session_processes import MARK, end_left_processes, session_environment
from fovea_gym.errors import ClusterError
from fovea_gym.processes.ending import running
from fovea_gym.utils.event_loop import wait_for
from tests.cluster.torchrun_runs import LONG, processes_of, rank_of, settings, torchrun
from tests.process_groups import members
from tests.runs import ROOT, environment
from tests.warm import start_rank

TIMEOUT_SECONDS = 2.0
PATIENCE = timedelta(seconds=600)
"""Of processes that are to end otherwise."""


def test_a_silence_lasts_from_the_last_message_without_the_time_in_which_the_driver_itself_was_stopped() -> None:
    """It has yet to read what came meanwhile, for which it has the whole timeout."""
    silence = Silence(1.0, now=100.0)
    assert [silence.seconds(now) for now in range(101, 112)] == [*range(1, 12)]
    silence.heard(111.5)
    assert [silence.seconds(now) for now in range(112, 115)] == [0.5, 1.5, 2.5]
    silence = Silence(1.0, now=100.0)
    assert [silence.seconds(now) for now in (500.0, 501.0, 502.0)] == [0.0, 1.0, 2.0]
    slow = Silence(1.0, now=100.0)
    assert [slow.seconds(now) for now in (103.0, 106.0, 109.0)] == [3.0, 6.0, 9.0], "slow looks count"


def test_silence_while_the_driver_itself_was_stopped_says_nothing() -> None:
    """A supervised run that was stopped by Ctrl-Z, and its workers with it."""
    script = (
        "import os, signal, time; from fovea.processes.heartbeat import Watch\n"
        f"Watch({TIMEOUT_SECONDS}, lambda: print('silent', flush=True)); os.kill(os.getpid(), signal.SIGSTOP)\n"
        f"time.sleep({TIMEOUT_SECONDS / 4})"
    )
    with Popen([sys.executable, "-c", script], stdout=PIPE, text=True) as process:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        time.sleep(1.1 * TIMEOUT_SECONDS)
        process.send_signal(signal.SIGCONT)
        assert process.communicate() == ("", None), "nobody else was silent"


def beat_only(_: int) -> None:
    """A worker whose only call never ends, and whose thread beats on to the other end of its standard input.

    It has started a process, as an engine's, in a separate session.
    """
    Popen(["sleep", "600"], start_new_session=True)
    # oftener than one whose driver has this timeout: on a busy machine some of the beats come late
    with beating(CallerConnection(Connection(0)).send, TIMEOUT_SECONDS / 4):
        time.sleep(PATIENCE.total_seconds())


def test_a_worker_that_computes_for_long_is_left_alone_and_a_stopped_one_is_killed(tmp_path: Path) -> None:
    here, there = Pipe()
    with there:
        process = start_rank(beat_only, 1, (), tmp_path, stdin=there.fileno())
    assert here.poll(PATIENCE.total_seconds()), "it has begun to beat"
    (below,) = psutil.Process(process.pid).children()
    handle = RemoteWorker(ConnectionLine(here, process.pid), 1, TIMEOUT_SECONDS)

    async def run() -> None:
        answer = await handle.start(Call(method="policy.update"))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(answer), 1.5 * TIMEOUT_SECONDS)
        process.send_signal(signal.SIGSTOP)
        message = r"rank 1 hangs: for cluster\.heartbeat_timeout_seconds=2\.0 nothing .*, in policy\.update"
        with pytest.raises(ClusterError, match=message):
            await answer
        await handle.close()

    wait_for(run())
    assert process.wait(PATIENCE.total_seconds()) == -signal.SIGKILL
    deadline = time.monotonic() + PATIENCE.total_seconds()
    while members(below.pid):
        assert time.monotonic() < deadline, "it is left behind"
        time.sleep(0.05)


def test_a_watch_that_has_ended_is_quiet_and_beats_end_with_the_line() -> None:
    silent, sent = Event(), list[bytes]()
    Watch(0.2, silent.set).end()
    assert not silent.wait(0.6)
    Watch(0.2, silent.set)
    assert silent.wait(10)

    def send(message: bytes) -> None:
        sent.append(message)
        raise BrokenPipeError

    with beating(send, 0.05 * BEATS_PER_TIMEOUT):
        time.sleep(0.5)
    assert sent == [b""]


def first_comes_alone(rank: int, store: str) -> None:
    """Rank 0 alone makes calls in the groups of some ranks: two replicas of a learner, and an engine that receives."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=3, timeout=PATIENCE)
    placement = Placement(num_learners=2, num_engines_only=1, learners_generate=False, replicas=2)
    dist.barrier()  # all of them have been imported, and make their groups at once
    role = Role.of(placement, "cpu", timedelta(seconds=TIMEOUT_SECONDS))
    dist.barrier()
    if rank:
        return time.sleep(PATIENCE.total_seconds())
    assert role.learners is not None
    assert role.receivers is not None
    assert role.learners.replicated is not None
    said = "in policy.update did not end within cluster.collective_timeout_seconds"
    meshes = (role.learners.mesh, role.learners.replicated["replicate"], role.receivers.mesh)
    # all at once, so that their time passes at once
    calls = [dist.all_reduce(torch.zeros(1), group=mesh.get_group(), async_op=True) for mesh in meshes]
    for call in calls:
        with pytest.raises(LostRankError, match=said), lost_ranks("policy.update"):
            call.wait()


def test_a_rank_that_never_comes_ends_the_collective_call_of_the_others(tmp_path: Path) -> None:
    first, *others = (
        start_rank(first_comes_alone, rank, (str(tmp_path / "store"),), tmp_path, stderr=PIPE) for rank in range(3)
    )
    _, errors = first.communicate(timeout=PATIENCE.total_seconds() / 2)
    for each in others:
        each.kill()
        each.communicate()
    assert first.returncode == 0, errors


class Failing:
    """A worker's end whose call ends with an error after a while."""

    image_bytes = sent_bytes = 0

    def __init__(self, error: Exception, seconds: float) -> None:
        self._error, self._seconds = error, seconds

    async def start(self, _call: Call) -> asyncio.Future[None]:
        async def fail() -> None:
            await asyncio.sleep(self._seconds)
            raise self._error

        return asyncio.ensure_future(fail())

    def forget_images(self) -> None: ...

    async def close(self) -> None: ...


def test_of_the_errors_of_a_collective_call_the_cause_is_raised() -> None:
    call = Call(method="policy.update")
    follows, cause = Failing(LostRankError("another rank has left"), 0.0), Failing(ClusterError("the cause"), 0.2)
    for other, kind, message in (
        (cause, ClusterError, "^the cause$"),
        (follows, LostRankError, "another rank has left"),
    ):
        with pytest.raises(kind, match=message):
            wait_for(call_each([(follows, call), (other, call)]))


@pytest.mark.slow
@pytest.mark.kill
def test_a_stopped_worker_of_a_run_ends_it(tmp_path: Path) -> None:
    """The driver waits in a collective call meanwhile, in which it can do nothing."""
    words = [*settings("recipes/shapes.yaml", tmp_path, *LONG), "cluster.heartbeat_timeout_seconds=10"]
    pipes: dict[str, Any] = {"stdout": DEVNULL, "stderr": PIPE, "text": True}
    with Popen(torchrun("train", *words), cwd=ROOT, env=environment(), **pipes) as process:
        while len(read_metrics(tmp_path)) < 2:
            assert process.poll() is None, process.communicate()
            time.sleep(0.1)
        (worker,) = (each for each in processes_of(tmp_path) if rank_of(each) == "1")
        os.kill(worker, signal.SIGSTOP)
        _, err = process.communicate(timeout=120)
    assert "the worker process of rank 1 hangs: for cluster.heartbeat_timeout_seconds=10" in err
    assert processes_of(tmp_path) == []


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
