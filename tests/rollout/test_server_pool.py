"""Several servers as one: who gets a call, and what becomes of it when its server is lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from fovea.errors import EngineError, LostEngineError
from fovea.rollout.server_pool import MAX_TRIES, PooledServer, ServerPool, TakenError
from fovea_gym.utils.event_loop import wait_for
from fovea_gym.utils.http_json import CallBounds, CallError, JsonServer
from gym_tests.chat_server import Endpoint
from gym_tests.tables import table

WHOLE, PART = (200, b'{"whole": true}'), (200, b'{"whole": false}')
OTHER_WEIGHTS = EngineError("it has other weights")
BOUNDS = CallBounds(timeout_seconds=5.0, calls_at_once=8)


class Prepared:
    """Prepares servers, and counts how often; those with an error are refused, from so many times on."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.errors: dict[str, Exception] = {}
        self.from_time = 1

    async def __call__(self, server: JsonServer) -> None:
        self.counts[server.url] += 1
        if server.url in self.errors and self.counts[server.url] >= self.from_time:
            raise self.errors[server.url]


def with_pool(
    use: Callable[[ServerPool], Coroutine[Any, Any, Any]],
    prepare: Prepared,
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
    headers = {"x-call": str(number)}
    whole = {"load": load, "parse": lambda answer: answer if answer["whole"] else None}
    return await pool.post("/ask", {"number": number}, headers=headers, **whole)


async def ask_twice(pool: ServerPool, seconds: float = 0.0) -> list[Any]:
    async def later() -> Any:
        await asyncio.sleep(seconds)
        return await ask(pool, 1)

    return await asyncio.gather(ask(pool), later())


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
    failing, other, prepare = started(failure, WHOLE), started(WHOLE), Prepared()
    other.delay_seconds = 0.2
    assert with_pool(ask_twice, prepare, failing, other) == [{"whole": True}] * 2
    assert len(failing.requests) + len(other.requests) == 3
    assert prepare.counts == {failing.url: 2, other.url: 1}


def test_a_server_that_was_started_again_unnoticed_is_prepared_before_it_answers(
    started: Callable[..., Endpoint], caplog: pytest.LogCaptureFixture
) -> None:
    again, prepare = started((409, b"started again"), WHOLE), Prepared()
    assert with_pool(ask, prepare, again) == {"whole": True}
    assert prepare.counts[again.url] == 2
    assert [each["x-call"] for each in again.headers] == ["0", "0"]
    lost, back = [each for each in caplog.messages if "servers" in each]
    assert lost.startswith(f"rollout.engine.servers: {again.url} is lost: status 409 ('started again'); the others")
    assert back == f"rollout.engine.servers: {again.url} is back, with the current weights"


def test_a_server_that_is_back_is_not_lost_by_a_call_from_before(
    started: Callable[..., Endpoint], caplog: pytest.LogCaptureFixture
) -> None:
    back, prepare = started((503, b"ending"), (409, b"started again"), WHOLE), Prepared()
    back.delay_seconds = 0.4
    assert with_pool(lambda pool: ask_twice(pool, 0.2), prepare, back) == [{"whole": True}] * 2
    assert prepare.counts[back.url] == 2
    assert sum("is lost" in each for each in caplog.messages) == 1


def test_a_call_waits_for_a_server_that_is_gone_until_it_is_back(started: Callable[..., Endpoint]) -> None:
    gone, prepare = started((503, b"ending"), WHOLE), Prepared()

    async def use(pool: ServerPool) -> Any:
        prepare.errors[gone.url] = OTHER_WEIGHTS
        asking = asyncio.ensure_future(ask(pool))
        await asyncio.sleep(0.2)
        assert not asking.done()
        prepare.errors.clear()
        return await asking

    assert with_pool(use, prepare, gone) == {"whole": True}
    assert prepare.counts[gone.url] > 2


def test_with_no_server_for_long_the_engine_is_lost(started: Callable[..., Endpoint]) -> None:
    """With exit code 3, so that `max_restarts` starts the run again."""
    gone, prepare = started((503, b"ending")), Prepared()
    prepare.errors[gone.url], prepare.from_time = OTHER_WEIGHTS, 2
    with pytest.raises(LostEngineError, match=rf"no server was ready for .*=0.3: {gone.url}: it has other.*start one"):
        with_pool(ask, prepare, gone, restart_seconds=0.3)


@table(
    ("reply", "message", "tries"),
    [
        ((400, b"too long"), r"refuses a request: status 400 \('too long'\)", 1),
        ((500, b"crash"), f"failed on each of the {MAX_TRIES} servers that it was sent to", MAX_TRIES),
        ((200, b'{"choices": []}'), r"http://127\.0\.0\.1:\d+/v1/ask sends an unexpected response \(KeyError: 'who", 1),
    ],
)
def test_what_servers_refuse_lose_or_answer_in_another_form_is_an_error(
    started: Callable[..., Endpoint], reply: tuple[int, bytes], message: str, tries: int
) -> None:
    """At once, but for a request that is lost: it is an error when every server has lost it."""
    servers = [started(reply), started(reply)]
    with pytest.raises(EngineError, match=message):
        with_pool(ask, Prepared(), *servers)
    assert sum(len(server.requests) for server in servers) == tries


@table(
    ("error", "message", "waits"),
    [
        (OTHER_WEIGHTS, "it has other weights", False),
        (CallError("nobody there"), "not all servers are ready: {url}: nobody there.*restart_seconds=0.2", True),
    ],
)
def test_a_server_that_is_not_fit_is_named_at_the_start_and_one_that_does_not_answer_is_waited_for(
    started: Callable[..., Endpoint], error: Exception, message: str, waits: bool
) -> None:
    good, bad, prepare = started(WHOLE), started(WHOLE), Prepared()
    prepare.errors[bad.url] = error
    with pytest.raises(EngineError, match=message.format(url=bad.url)):
        with_pool(ask, prepare, good, bad, restart_seconds=0.2)
    assert (prepare.counts[bad.url] > 1) == waits


def test_a_server_that_another_run_takes_ends_the_call_at_once(started: Callable[..., Endpoint]) -> None:
    """Its own answer only says that it holds other weights: to prepare it again finds whose they are."""
    taken, prepare = started((409, b"other weights")), Prepared()
    prepare.errors[taken.url], prepare.from_time = TakenError("another run"), 2

    async def use(pool: ServerPool) -> None:
        with pytest.raises(TakenError, match="another run"):
            await ask(pool)
        with pytest.raises(TakenError, match="another run"):
            await pool.on_all(prepare)

    with_pool(use, prepare, taken, restart_seconds=60.0)


def test_a_call_of_all_leaves_out_and_prepares_again_what_it_loses(started: Callable[..., Endpoint]) -> None:
    good, failing, prepare = started(WHOLE), started((500, b"crash"), WHOLE), Prepared()

    async def sync(server: JsonServer) -> None:
        await server.post("/sync", {})

    async def use(pool: ServerPool) -> None:
        await pool.on_all(sync)
        while not all(member.is_ready for member in pool.members):
            await asyncio.sleep(0.01)

    with_pool(use, prepare, good, failing)
    assert prepare.counts == {good.url: 1, failing.url: 2}
