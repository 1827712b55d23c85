"""Several servers as one: who gets a call, and what becomes of it when its server is lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from fovea.errors import EngineError, LostEngineError
from fovea.rollout import server_pool
from fovea.rollout.server_pool import MAX_TRIES, PooledServer, ServerPool, TakenError
from fovea_gym.utils.event_loop import wait_for
from fovea_gym.utils.http_json import CallBounds, CallError, JsonServer
from gym_tests.chat_server import Endpoint

WHOLE = (200, b'{"whole": true}')
PART = (200, b'{"whole": false}')
BOUNDS = CallBounds(timeout_seconds=5.0, calls_at_once=8)


class Prepared:
    """Prepares servers, and counts how often; those in `unfit` are refused."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.unfit: set[str] = set()

    async def __call__(self, server: JsonServer) -> None:
        self.counts[server.url] += 1
        if server.url in self.unfit:
            raise EngineError("it has other weights")


def with_pool(
    use: Callable[[ServerPool], Coroutine[Any, Any, Any]],
    prepare: server_pool.Prepare,
    *servers: Endpoint,
    restart_seconds: float = 5.0,
) -> Any:
    async def run() -> Any:
        members = [PooledServer(JsonServer(each.url, BOUNDS)) for each in servers]
        pool = ServerPool(members=members, prepare=prepare, restart_seconds=restart_seconds)
        try:
            await pool.start()
            return await use(pool)
        finally:
            await pool.close()

    return wait_for(run())


async def ask(pool: ServerPool, number: int = 0, load: int = 1) -> Any:
    return await pool.post(
        "/ask",
        {"number": number},
        headers={"x-call": str(number)},
        load=load,
        parse=lambda answer: answer if answer["whole"] else None,
    )


def test_a_call_goes_to_the_server_with_the_least_to_do(started: Callable[..., Endpoint]) -> None:
    servers = [started(WHOLE), started(WHOLE)]
    for server in servers:
        server.delay_seconds = 0.3

    async def use(pool: ServerPool) -> None:
        await asyncio.gather(ask(pool, 0, load=4), *(ask(pool, number) for number in range(1, 5)))

    with_pool(use, Prepared(), *servers)
    assert sorted(sorted(sent["number"] for sent in server.requests) for server in servers) == [[0], [1, 2, 3, 4]]


@pytest.mark.parametrize("failure", [(503, b"ending"), (429, b"busy"), PART])
def test_a_call_that_a_server_loses_is_made_once_more_and_the_server_prepared_again(
    started: Callable[..., Endpoint], failure: tuple[int, bytes]
) -> None:
    failing, other = started(failure, WHOLE), started(WHOLE)
    other.delay_seconds = 0.2
    prepare = Prepared()

    async def use(pool: ServerPool) -> list[Any]:
        return await asyncio.gather(ask(pool, 0), ask(pool, 1))

    assert with_pool(use, prepare, failing, other) == [{"whole": True}] * 2
    assert len(failing.requests) + len(other.requests) == 3
    assert prepare.counts[failing.url] == 2
    assert prepare.counts[other.url] == 1


def test_a_server_that_was_started_again_unnoticed_is_prepared_before_it_answers(
    started: Callable[..., Endpoint], caplog: pytest.LogCaptureFixture
) -> None:
    again = started((409, b"started again"), WHOLE)
    prepare = Prepared()
    assert with_pool(ask, prepare, again) == {"whole": True}
    assert prepare.counts[again.url] == 2
    assert [each["x-call"] for each in again.headers] == ["0", "0"]
    lost, back = [each for each in caplog.messages if "servers" in each]
    assert lost.startswith(f"rollout.engine.servers: {again.url} is lost: status 409 ('started again'); the others")
    assert back == f"rollout.engine.servers: {again.url} is back, with the current weights"


def test_a_server_that_is_back_is_not_lost_by_a_call_from_before(
    started: Callable[..., Endpoint], caplog: pytest.LogCaptureFixture
) -> None:
    back = started((503, b"ending"), (409, b"started again"), WHOLE)
    back.delay_seconds = 0.4
    prepare = Prepared()

    async def later(pool: ServerPool) -> Any:
        await asyncio.sleep(0.2)
        return await ask(pool)

    async def use(pool: ServerPool) -> list[Any]:
        return await asyncio.gather(ask(pool), later(pool))

    assert with_pool(use, prepare, back) == [{"whole": True}] * 2
    assert prepare.counts[back.url] == 2
    assert sum("is lost" in each for each in caplog.messages) == 1


def test_a_call_waits_for_a_server_that_is_gone_until_it_is_back(started: Callable[..., Endpoint]) -> None:
    gone = started((503, b"ending"), WHOLE)
    prepare = Prepared()

    async def use(pool: ServerPool) -> Any:
        prepare.unfit.add(gone.url)
        asking = asyncio.ensure_future(ask(pool))
        await asyncio.sleep(0.2)
        assert not asking.done()
        prepare.unfit.clear()
        return await asking

    assert with_pool(use, prepare, gone) == {"whole": True}
    assert prepare.counts[gone.url] > 2


def test_with_no_server_for_long_the_engine_is_lost(started: Callable[..., Endpoint]) -> None:
    """With exit code 3, so that `max_restarts` starts the run again."""
    gone = started((503, b"ending"))
    prepare = Prepared()

    async def use(pool: ServerPool) -> None:
        prepare.unfit.add(gone.url)
        await ask(pool)

    with pytest.raises(LostEngineError, match=rf"no server was ready for .*=0.3: {gone.url}: it has other.*start one"):
        with_pool(use, prepare, gone, restart_seconds=0.3)


def test_what_a_server_refuses_is_an_error_at_once(started: Callable[..., Endpoint]) -> None:
    servers = [started((400, b"too long")), started((400, b"too long"))]
    with pytest.raises(EngineError, match=r"refuses a request: status 400 \('too long'\)"):
        with_pool(ask, Prepared(), *servers)
    assert sum(len(server.requests) for server in servers) == 1


def test_a_request_that_every_server_loses_is_an_error_in_the_end(started: Callable[..., Endpoint]) -> None:
    servers = [started((500, b"crash")), started((500, b"crash"))]
    with pytest.raises(EngineError, match=f"failed on each of the {MAX_TRIES} servers that it was sent to"):
        with_pool(ask, Prepared(), *servers)
    assert sum(len(server.requests) for server in servers) == MAX_TRIES


def test_a_server_that_is_not_fit_is_named_at_the_start(started: Callable[..., Endpoint]) -> None:
    good, bad = started(WHOLE), started(WHOLE)
    prepare = Prepared()
    prepare.unfit.add(bad.url)
    with pytest.raises(EngineError, match="it has other weights"):
        with_pool(ask, prepare, good, bad)
    assert prepare.counts[bad.url] == 1, "waiting would not help"


def test_a_server_that_does_not_answer_is_waited_for_and_named_in_the_end(started: Callable[..., Endpoint]) -> None:
    good, gone = started(WHOLE), started(WHOLE)

    async def prepare(server: JsonServer) -> None:
        if server.url == gone.url:
            raise CallError("nobody there")

    with pytest.raises(EngineError, match=f"not all servers are ready: {gone.url}: nobody there.*restart_seconds=0.2"):
        with_pool(ask, prepare, good, gone, restart_seconds=0.2)


def test_a_server_that_another_run_takes_ends_the_call_at_once(started: Callable[..., Endpoint]) -> None:
    """Its own answer only says that it holds other weights: to prepare it again finds whose they are."""
    taken = started((409, b"other weights"))
    counts = Counter[str]()

    async def prepare(server: JsonServer) -> None:
        counts[server.url] += 1
        if counts[server.url] > 1:
            raise TakenError("another run")

    async def use(pool: ServerPool) -> None:
        with pytest.raises(TakenError, match="another run"):
            await ask(pool)
        with pytest.raises(TakenError, match="another run"):
            await pool.on_all(prepare)

    with_pool(use, prepare, taken, restart_seconds=60.0)


def test_a_call_of_all_leaves_out_and_prepares_again_what_it_loses(started: Callable[..., Endpoint]) -> None:
    good, failing = started(WHOLE), started((500, b"crash"), WHOLE)
    prepare = Prepared()

    async def sync(server: JsonServer) -> None:
        await server.post("/sync", {})

    async def use(pool: ServerPool) -> None:
        await pool.on_all(sync)
        while not all(member.is_ready for member in pool.members):
            await asyncio.sleep(0.01)

    with_pool(use, prepare, good, failing)
    assert prepare.counts == {good.url: 1, failing.url: 2}


def test_an_answer_of_another_form_is_an_error_that_names_the_server(started: Callable[..., Endpoint]) -> None:
    other = started((200, b'{"choices": []}'))
    with pytest.raises(EngineError, match=rf"{other.url}/ask sends an unexpected response \(KeyError: 'who"):
        with_pool(ask, Prepared(), other)
    assert len(other.requests) == 1
