"""Calls over a real connection between two event loops: results, errors, and a worker that ends."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from multiprocessing import Pipe
from pathlib import Path
from threading import Event, Thread
from typing import Any, cast

import numpy as np
import pytest

from fovea.cluster.remote import ConnectionLine, RemoteWorker, rules_of
from fovea.cluster.services import WorkersEngine, WorkersPolicy
from fovea.cluster.workers import LocalHandle, Worker, WorkerHandle, Workers
from fovea.config.sections import Train
from fovea.errors import EngineError
from fovea.processes.calls import Call
from fovea.processes.serving import CallerConnection, serve_connection
from fovea.train.base import SftExample
from fovea.train.local import LocalPolicy
from fovea.train.row_assignment import RowAssignment
from fovea.train.schedule import ImagesByRank, UpdatePasses
from fovea.types import Completion, Prompt, PromptImage, Request, Sampling
from fovea_gym.errors import ClusterError
from fovea_gym.utils.event_loop import wait_for
from tests.records import completion_of, text_prompt
from tests.runs import ROOT, environment, run_program

LIMIT_SECONDS = 20
driver_is_gone = Event()
remote_takes_part = Event()


@dataclass
class Engine:
    """Answers once all requests of a turn are there, and writes down how many it saw at once."""

    name: str
    seen: list[str] = field(default_factory=list)
    at_once: list[int] = field(default_factory=list)

    async def generate(self, request: Request) -> Sequence[Completion]:
        if request.prompt.num_tokens == 0:
            raise EngineError("a prompt without tokens")
        self.seen.append(request.id)
        await asyncio.sleep(0.05)
        self.at_once.append(len(self.seen))
        return [completion_of([0], id=f"{request.id}/{n}", text=self.name) for n in range(request.n)]

    async def sleep(self) -> None:
        self.seen.append("sleep")

    async def close(self) -> None:
        self.seen.append("close")


@dataclass
class Policy:
    async def finish_save(self) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def close(self) -> None:
        """Nothing to close."""

    def images_by_rank(self) -> ImagesByRank:
        none = cast(Any, None)
        rows = RowAssignment(train=Train(), cost=none, num_ranks=1, image_token_id=0, shards_tower=False)
        schedule = UpdatePasses(algorithm=none, plain_update_every_steps=1, step=0)
        return ImagesByRank(policy=rows, reference=None, schedule=schedule, limit_tokens=1)

    async def sft(self, pairs: Sequence[SftExample]) -> dict[str, float]:
        return {"loss": float(sum(image.num_bytes for pair in pairs for image in pair.prompt.images))}

    async def update(self, batch: object) -> dict[str, float]:
        if batch == "bad":
            raise ValueError("only on this rank")
        if batch == "together":
            remote_takes_part.set()
        if batch == "stuck":  # as in a collective call that the driver has left
            driver_is_gone.wait(LIMIT_SECONDS)
        return {"loss": 1.0}


def request(name: str, n: int = 2, *, length: int = 1, **changes: Any) -> Request:
    fields = {"prompt": text_prompt([0] * length), "sampling": Sampling(max_new_tokens=1), **changes}
    return Request(id=name, n=n, **fields)


def prompt_with_image(key: str) -> Prompt:
    """Of a token and 32 bytes of pixels."""
    image = PromptImage(key=key, tensors={"pixels": np.zeros(8, np.float32)}, num_tokens=1, grid=(1, 1, 1))
    return replace(text_prompt([0]), images=(image,))


def worker(name: str) -> Worker:
    return cast(Any, Worker)(policy=Policy(), engine=Engine(name), weight_sync=None)


def workers(*handles: WorkerHandle) -> Workers:
    """Workers that hold a policy and an engine each."""
    return Workers(handles, handles)


@dataclass
class Remote:
    handle: RemoteWorker
    worker: Worker
    thread: Thread
    errors: list[BaseException]


@pytest.fixture
def remote() -> Iterator[Remote]:
    here, there = Pipe()
    served, errors = worker("remote"), []

    def run() -> None:
        try:
            wait_for(serve_connection(served, CallerConnection(there), rules_of(served)))
        except BaseException as error:
            errors.append(error)

    thread = Thread(target=run, daemon=True)
    thread.start()
    handle = RemoteWorker(ConnectionLine(here), 1, 600.0)
    yield Remote(handle, served, thread, errors)
    wait_for(handle.close())
    thread.join(LIMIT_SECONDS)
    assert not thread.is_alive(), "a worker outlived its driver"


async def result(handle: RemoteWorker, method: str, *arguments: object) -> Any:
    return await asyncio.wait_for(await start(handle, method, *arguments), LIMIT_SECONDS)


async def start(handle: RemoteWorker, method: str, *arguments: object) -> Any:
    return await handle.start(Call(method=method, arguments=arguments))


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test on the event loop of this process."""

    @wraps(test)
    def run(**fixtures: Any) -> None:
        wait_for(test(**fixtures))

    return run


def engine_of(remote: Remote) -> WorkersEngine:
    """A local engine and the remote one."""
    return WorkersEngine(workers(LocalHandle(worker("local")), remote.handle), "test")


@in_loop
async def test_requests_of_one_turn_arrive_together(remote: Remote) -> None:
    engine = engine_of(remote)
    groups = await asyncio.gather(*(engine.generate(request(f"r{index}")) for index in range(6)))
    assert [each.id for group in groups for each in group] == [f"r{i}/{j}" for i in range(6) for j in range(2)]
    assert [group[0].text for group in groups] == ["local", "remote"] * 3
    assert cast(Any, remote.worker.engine).at_once == [3, 3, 3]


@in_loop
async def test_images_of_the_steps_of_a_warm_up_do_not_pile_up(remote: Remote) -> None:
    policy = WorkersPolicy(Workers([remote.handle], []), cast(Any, None))
    for key in ("a", "b"):
        found = await policy.sft([SftExample(prompt=prompt_with_image(key), answer_ids=(0,))])
        assert (found, remote.handle._calls.packing.named) == ({"loss": 32.0}, {}), "it came with its pixels"


@in_loop
async def test_images_of_requests_are_forgotten_but_not_while_an_answer_may_name_one(remote: Remote) -> None:
    engine = WorkersEngine(workers(remote.handle), "test")
    named = remote.handle._calls.packing.named
    driver_is_gone.clear()
    await engine.generate(request("r", prompt=prompt_with_image("a")))
    update = await start(remote.handle, "policy.update", "stuck")
    engine.forget_images()
    assert named.keys() == {"a"}
    driver_is_gone.set()
    await update
    waiting = await start(remote.handle, "engine.generate", request("s"))
    engine.forget_images()
    assert not named, "a request that runs has its images"
    await waiting


@in_loop
async def test_a_later_turn_goes_to_the_engine_that_keeps_the_turn_before(remote: Remote) -> None:
    engine = engine_of(remote)
    first = await asyncio.gather(*(engine.generate(request(f"a{index}", keep=True)) for index in range(4)))
    # only by load, both would go to the driver's own engine
    later = [await engine.generate(request("b", 1, continues=group[1].id)) for group in (first[1], first[3])]
    assert [group[0].text for group in later] == ["remote", "remote"]


@in_loop
async def test_an_engines_error_reaches_its_caller_and_the_worker_goes_on(remote: Remote) -> None:
    with pytest.raises(EngineError, match="a prompt without tokens"):
        await result(remote.handle, "engine.generate", request("r", length=0))
    assert (await result(remote.handle, "engine.generate", request("s")))[0].id == "s/0"


@in_loop
async def test_a_full_disk_is_told_as_such_and_the_worker_goes_on_until_the_run_is_ended(remote: Remote) -> None:
    """The driver may be in the middle of a step, which the others could not finish without this worker."""
    with pytest.raises(OSError, match="No space left on device") as caught:
        await result(remote.handle, "policy.finish_save")
    assert caught.value.errno == errno.ENOSPC
    assert await result(remote.handle, "policy.update", "") == {"loss": 1.0}


def test_a_collective_call_that_fails_is_told_and_ends_the_worker(remote: Remote) -> None:
    with pytest.raises(ClusterError, match="ValueError: only on this rank"):
        wait_for(result(remote.handle, "policy.update", "bad"))
    remote.thread.join(LIMIT_SECONDS)
    assert [type(error) for error in remote.errors] == [ValueError]


@in_loop
async def test_a_worker_that_has_ended_fails_the_calls_that_wait_by_its_rank(remote: Remote) -> None:
    waiting = await start(remote.handle, "engine.generate", request("r"))
    bad = await start(remote.handle, "policy.update", "bad")
    with pytest.raises(ClusterError, match="only on this rank"):
        await bad
    with pytest.raises(ClusterError, match="rank 1 has ended"):
        await waiting
    with pytest.raises(ClusterError, match="rank 1 has ended"):
        await result(remote.handle, "engine.sleep")


class DeafLine:
    """A line that has ended but for its sending, as of an actor of Ray whose calls nobody serves any more."""

    async def send(self, message: bytes) -> None: ...

    def receive(self) -> bytes:
        raise EOFError("nobody is there")

    def hang_up(self) -> None: ...

    def kill(self) -> None: ...


@in_loop
async def test_a_call_to_a_worker_that_has_ended_fails_although_it_could_be_sent() -> None:
    handle = RemoteWorker(DeafLine(), 1, 600.0)
    await asyncio.sleep(0.1)
    with pytest.raises(ClusterError, match=r"rank 1 has ended \(nobody is there\)"):
        await result(handle, "engine.sleep")
    await handle.close()


@in_loop
async def test_an_answer_that_cannot_be_read_fails_the_calls_that_wait() -> None:
    here, there = Pipe()
    handle = RemoteWorker(ConnectionLine(here), 1, 600.0)
    answer = await start(handle, "engine.sleep")
    there.send_bytes(b"no pickle")
    with pytest.raises(ClusterError, match="rank 1 has ended"):
        await asyncio.wait_for(answer, LIMIT_SECONDS)
    await handle.close()


@in_loop
async def test_the_answer_to_a_cancelled_call_is_in_no_later_ones_way(remote: Remote) -> None:
    waiting = asyncio.ensure_future(await start(remote.handle, "engine.generate", request("r")))
    waiting.cancel()
    await asyncio.sleep(0.2)
    assert (await result(remote.handle, "engine.generate", request("s")))[0].id == "s/0"


def test_requests_of_a_driver_that_hangs_up_are_dropped(remote: Remote) -> None:
    """As rollouts drawn ahead are, when a signal or the time limit ends a run: no error, and no wait for the rest."""
    dropped = Event()

    async def generate(_: Request) -> Sequence[Completion]:
        try:
            await asyncio.sleep(10 * LIMIT_SECONDS)
        except asyncio.CancelledError:
            dropped.set()
            raise
        return ()

    cast(Any, remote.worker.engine).generate = generate

    async def run() -> None:
        waiting = await start(remote.handle, "engine.generate", request("r"))
        # a second call, whose answer says that the first one has begun
        await result(remote.handle, "engine.sleep")
        await remote.handle.close()
        with pytest.raises(ClusterError, match="rank 1 has ended"):
            await waiting

    wait_for(run())
    remote.thread.join(LIMIT_SECONDS)
    assert (remote.thread.is_alive(), remote.errors, dropped.is_set()) == (False, [], True)
    assert cast(Any, remote.worker.engine).seen == ["sleep", "close"]


def test_workers_are_closed_while_one_waits_in_a_call_that_the_driver_has_left(remote: Remote) -> None:
    local = worker("local")

    async def run() -> None:
        await start(remote.handle, "policy.update", "stuck")
        await asyncio.sleep(0.1)
        policy = WorkersPolicy(workers(LocalHandle(local), remote.handle), cast(Any, None))
        await asyncio.wait_for(policy.close(), LIMIT_SECONDS / 4)

    driver_is_gone.clear()
    wait_for(run())
    driver_is_gone.set()
    remote.thread.join(LIMIT_SECONDS)
    assert [cast(Any, each.engine).seen for each in (local, remote.worker)] == [["close"], ["close"]]


def test_the_drivers_own_worker_begins_after_all_others_have_the_call(remote: Remote) -> None:
    class Blocking:
        def update(self, batch: object) -> dict[str, float]:
            # the event loop stands still until the other worker takes part, as in a collective call
            return {"loss": 2.0 if remote_takes_part.wait(LIMIT_SECONDS) else 0.0}

    remote_takes_part.clear()
    local = Worker(policy=LocalPolicy(cast(Any, Blocking())), engine=None, weight_sync=cast(Any, None))
    policy = WorkersPolicy(workers(LocalHandle(local), remote.handle), cast(Any, None))
    assert wait_for(policy._call("update", "together"))["loss"] == 2.0, "that of the first learner"


def test_only_engines_beside_a_shard_of_the_policy_sleep(remote: Remote) -> None:
    local = worker("local")
    own = LocalHandle(local)
    engine = WorkersEngine(Workers([own], [own, remote.handle]), "test")
    wait_for(engine.sleep())
    assert [cast(Any, each.engine).seen for each in (local, remote.worker)] == [["sleep"], []]


OF_RANK = """
import json, os
from pathlib import Path
import psutil
import torch.distributed as dist
from fovea.cluster.torchrun import join

ranks = join(60)
listening = [each for each in psutil.Process().net_connections("inet") if each.status == psutil.CONN_LISTEN]
addresses = sorted({each.laddr.ip.removeprefix("::ffff:") for each in listening})
found = json.dumps([os.environ["GLOO_SOCKET_IFNAME"], *addresses])
Path(__file__).with_name(f"{ranks.rank}.json").write_text(found)
dist.barrier()
"""


def test_process_groups_under_torchrun(tmp_path: Path) -> None:
    """By the interface, too: where a machine's name is of loopback, gloo listens there by itself.

    torchrun's own store is in a separate process.
    """
    (tmp_path / "script.py").write_text(OF_RANK)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", str(tmp_path / "script.py")]
    assert run_program(launcher, environment() | {"PYTHONPATH": str(ROOT)}).returncode == 0
    assert [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)] == [["lo", "127.0.0.1"]] * 2
