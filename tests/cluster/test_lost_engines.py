"""Engines in their own processes that are killed: their requests are made again on those that are left."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from fovea.cluster.remote import ConnectionLine, RemoteWorker, rules_of
from fovea.cluster.services import WorkersEngine, WorkersWeights
from fovea.cluster.workers import LocalHandle, Worker, Workers
from fovea.errors import LostWorkerError
from fovea.processes.engine_process import EngineProcess
from fovea.processes.serving import CallerConnection, serve_connection
from fovea.rollout.remote_engine import RemoteEngine
from fovea.types import Completion, Request, Sampling
from fovea.weights.base import SyncReport
from fovea.wiring.engine import NO_LIMITS
from fovea_gym.utils.event_loop import wait_for
from tests.rollout.drawing import make_engine, same
from tests.tiny_models import mixed_prompts, tiny
from tests.warm import start_rank

pytestmark = pytest.mark.kill

LIMIT_SECONDS = 300


def make() -> Any:
    engine = make_engine(tiny("qwen3_vl"))
    engine.load_weights(dict(tiny("qwen3_vl").network.named_parameters()), 3)
    return engine


def serve_engine(_: int) -> None:
    """An engine whose driver is at the other end of its standard input."""
    connection = Connection(0)
    torch.set_num_threads(1)
    worker = cast(Any, Worker)(policy=None, engine=make(), weight_sync=None)
    connection.send_bytes(b"ready")
    wait_for(serve_connection(worker, CallerConnection(connection), rules_of(worker)))


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Workers]:
    """Two engines with the same weights, in a process each, and no learner."""
    handles, processes = [], []
    for rank in (1, 2):
        here, there = Pipe()
        with there:
            processes.append(start_rank(serve_engine, rank, (), tmp_path, stdin=there.fileno()))
        assert here.recv_bytes() == b"ready"
        handles.append(RemoteWorker(ConnectionLine(here, processes[-1].pid), rank, 600.0))
    workers = Workers([], handles)
    yield workers
    wait_for(workers.close())
    for process in processes:
        process.wait(LIMIT_SECONDS)  # none outlives its driver


def requests() -> list[Request]:
    prompts = mixed_prompts(tiny("qwen3_vl")) * 2
    seeds = [Sampling(max_new_tokens=12, seed=place) for place in range(len(prompts))]
    return [Request(id=f"r{x.seed}", prompt=prompt, sampling=x, n=2) for prompt, x in zip(prompts, seeds, strict=True)]


def pid_of(workers: Workers, place: int) -> int:
    return cast(int, cast(Any, workers.engines[place]).line.pid)


def test_requests_of_a_killed_engine_are_made_again_with_the_same_completions(engines: Workers) -> None:
    stopped = pid_of(engines, 1)

    async def draw() -> list[Sequence[Completion]]:
        os.kill(stopped, signal.SIGSTOP)  # so that it has requests, and answers none of them
        drawing = asyncio.gather(*map(WorkersEngine(engines, "test").generate, requests()))
        while not engines.engines[1].sent_bytes:
            await asyncio.sleep(0.01)
        os.kill(stopped, signal.SIGKILL)
        return await asyncio.wait_for(drawing, LIMIT_SECONDS)

    groups = wait_for(draw())
    assert engines.requests_reissued() == len(requests()) // 2
    assert engines.requests_reissued() == 0, "counted once"
    assert [handle.rank for handle in engines.engines] == [1]
    assert [engines.engines_lost(), engines.engines_lost()] == [1, 0], "counted once, however many requests it had"

    async def undisturbed() -> list[Sequence[Completion]]:
        return await asyncio.gather(*map(make().generate, requests()))

    for found, expected in zip(groups, wait_for(undisturbed()), strict=True):
        assert [each.id for each in found] == [each.id for each in expected], "none lost, none doubled"
        assert same(found, expected)


class SyncToEngine:
    """Counts the weight syncs to an engine, each of which begins with a call of its process."""

    def __init__(self, engine: RemoteEngine | None) -> None:
        self.engine = engine
        self.versions: list[int] = []
        self.left: list[Sequence[int]] = []

    async def sync(self, version: int) -> SyncReport:
        if self.engine is not None:
            self.engine.begin_sync({})
            self.engine.finish_sync(version)
        self.versions.append(version)
        return SyncReport(version=version, num_tensors=0, bytes_copied=0)

    async def leave_out_lost(self, left: Sequence[int]) -> None:
        self.left.append(left)


def test_an_engine_that_has_ended_without_a_request_is_left_out_of_the_next_weight_sync() -> None:
    host = [sys.executable, "-m", "tests.rollout.fake_engine_host"]
    engines = [RemoteEngine("fake", EngineProcess("the fake engine", host, {}, NO_LIMITS)) for _ in range(2)]
    syncs = [SyncToEngine(each) for each in (None, *engines)]
    made = [cast(Any, Worker)(policy=None, engine=each.engine, weight_sync=each) for each in syncs]
    learner, *handles = map(LocalHandle, made)
    workers = Workers([learner], handles)

    async def sync() -> None:
        weights = WorkersWeights(workers)
        await weights.sync(1)
        os.kill(engines[0].process.pid, signal.SIGKILL)
        while engines[0].process.exit_code is None:
            await asyncio.sleep(0.05)
        await weights.sync(2)

    try:
        wait_for(sync())
    finally:
        wait_for(workers.close())
    assert [each.versions for each in syncs] == [[1, 2], [1], [1, 2]]
    assert workers.engines == handles[1:]
    assert workers.engines_lost() == 1
    assert len(syncs[0].left) == 1, "told once whom to send to"


def test_the_loss_of_the_last_engine_reaches_every_caller(engines: Workers) -> None:
    async def draw() -> list[Any]:
        for place in (0, 1):
            os.kill(pid_of(engines, place), signal.SIGKILL)
        drawing = map(WorkersEngine(engines, "test").generate, requests())
        return await asyncio.gather(*drawing, return_exceptions=True)

    found = wait_for(draw())
    assert all(isinstance(each, LostWorkerError) for each in found), found
    assert "has ended" in str(found[0])
