"""Workers that hang: stopped processes, and ranks that never come to a collective call."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Event

import pytest
import torch
import torch.distributed as dist

from fovea.cluster.collective_errors import lost_ranks
from fovea.cluster.connection import ConnectionLine, DriverConnection
from fovea.cluster.heartbeat import BEATS_PER_TIMEOUT, Watch, beating
from fovea.cluster.placement import Placement, Role
from fovea.cluster.remote import RemoteWorker
from fovea.cluster.workers import Call, call_each
from fovea.errors import ClusterError, LostRankError
from fovea.metrics.log import read_metrics
from fovea.utils.event_loop import wait_for
from tests.cluster.torchrun_runs import LONG, processes_of, rank_of, settings, torchrun
from tests.runs import ROOT, environment

TIMEOUT_SECONDS = 2.0


def beat_only(there: Connection) -> None:
    """A worker whose only call never ends, and whose thread beats on."""
    with beating(DriverConnection(there).send, TIMEOUT_SECONDS):
        time.sleep(600)


def test_a_worker_that_computes_for_long_is_left_alone_and_a_stopped_one_is_killed() -> None:
    here, there = Pipe()
    process = get_context("spawn").Process(target=beat_only, args=(there,), daemon=True)
    process.start()
    there.close()
    assert here.poll(60), "it has begun to beat"
    handle = RemoteWorker(ConnectionLine(here, process.pid), 1, TIMEOUT_SECONDS)

    async def run() -> None:
        answer = await handle.start(Call(service="policy", method="update"))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(answer), 3 * TIMEOUT_SECONDS)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(
            ClusterError,
            match=r"rank 1 hangs: for cluster\.heartbeat_timeout_seconds=2\.0 nothing .*, in policy\.update",
        ):
            await asyncio.wait_for(answer, 60)
        await handle.close()

    wait_for(run())
    process.join(10)
    assert process.exitcode == -signal.SIGKILL, "nothing is left behind"


def test_silence_while_the_driver_itself_was_stopped_says_nothing() -> None:
    """A supervised run that was stopped by Ctrl-Z, and its workers with it."""
    script = (
        "import time; from fovea.cluster.heartbeat import Watch\n"
        "end = time.monotonic() + 4.8\n"  # it may be stopped before it begins to sleep
        "Watch(3.0, lambda: print('silent', flush=True)); print('watching', flush=True)\n"
        "while time.monotonic() < end: time.sleep(0.01)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "watching\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(4.0)
        process.send_signal(signal.SIGCONT)
        assert process.stdout.read() == "", "nobody else was silent"


def test_a_watch_that_has_ended_is_quiet() -> None:
    silent = Event()
    watch = Watch(0.2, silent.set)
    watch.end()
    assert not silent.wait(0.6)
    Watch(0.2, silent.set)
    assert silent.wait(10)


def test_beats_end_with_the_line() -> None:
    sent: list[bytes] = []

    def send(message: bytes) -> None:
        sent.append(message)
        raise BrokenPipeError

    with beating(send, 0.05 * BEATS_PER_TIMEOUT):
        time.sleep(0.5)
    assert sent == [b""]


def first_comes_alone(rank: int, store: str) -> None:
    """Rank 0 alone makes calls in the groups of some ranks: two replicas of a learner, and an engine that receives."""
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=3, timeout=timedelta(seconds=120)
    )
    placement = Placement(num_learners=2, num_engines_only=1, learners_generate=False, replicas=2)
    role = Role.of(placement, "cpu", timedelta(seconds=TIMEOUT_SECONDS))
    dist.barrier()
    if rank:
        return time.sleep(60)
    assert role.learners is not None
    assert role.receivers is not None
    assert role.learners.replicated is not None
    said = "in policy.update did not end within cluster.collective_timeout_seconds"
    for mesh in (role.learners.mesh, role.learners.replicated["replicate"], role.receivers.mesh):
        assert mesh is not None
        began = time.monotonic()
        with pytest.raises(LostRankError, match=said), lost_ranks("policy.update"):
            dist.all_reduce(torch.zeros(1), group=mesh.get_group())
        assert time.monotonic() - began < 10 * TIMEOUT_SECONDS


def test_a_rank_that_never_comes_ends_the_collective_call_of_the_others(tmp_path: Path) -> None:
    context = get_context("spawn")
    ranks = [context.Process(target=first_comes_alone, args=(rank, str(tmp_path / "store"))) for rank in range(3)]
    for each in ranks:
        each.start()
    ranks[0].join(100)
    for each in ranks[1:]:
        each.kill()
    assert ranks[0].exitcode == 0


class Failing:
    """A worker's end whose call ends with an error after a while."""

    image_bytes = 0
    sent_bytes = 0

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
    call = Call(service="policy", method="update")
    follows, cause = Failing(LostRankError("another rank has left"), 0.0), Failing(ClusterError("the cause"), 0.2)
    with pytest.raises(ClusterError, match=r"^the cause$"):
        wait_for(call_each([(follows, call), (cause, call)]))
    with pytest.raises(LostRankError, match="another rank has left"):
        wait_for(call_each([(follows, call), (follows, call)]))


@pytest.mark.slow
@pytest.mark.kill
def test_a_stopped_worker_of_a_run_ends_it(tmp_path: Path) -> None:
    """The driver waits in a collective call meanwhile, in which it can do nothing."""
    words = [*settings("recipes/shapes.yaml", tmp_path, *LONG), "cluster.heartbeat_timeout_seconds=10"]
    with subprocess.Popen(
        torchrun("train", *words),
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        while len(read_metrics(tmp_path)) < 2:
            assert process.poll() is None, process.communicate()
            time.sleep(0.1)
        (worker,) = (each for each in processes_of(tmp_path) if rank_of(each) == "1")
        os.kill(worker, signal.SIGSTOP)
        _, err = process.communicate(timeout=120)
    assert "the worker process of rank 1 hangs: for cluster.heartbeat_timeout_seconds=10" in err
    assert processes_of(tmp_path) == []
