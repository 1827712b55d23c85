"""What the loop awaits of the embedded engine besides completions: pause, sleep and close."""

from __future__ import annotations

import asyncio

import pytest

from fovea.errors import EngineError
from fovea.models.tiny import TinyParts
from fovea.rollout.embedded.engine import EmbeddedEngine
from fovea.types import Completion, Request, Sampling
from fovea.utils.event_loop import wait_for
from tests.rollout.drawing import generate, make_engine, same
from tests.tiny_models import mixed_prompts, tiny

SAMPLING = Sampling(max_new_tokens=20, seed=5)
SWITCHES = 200
"""Of the event loop; a completion of 20 tokens takes about as many as it has tokens."""


def request(parts: TinyParts) -> Request:
    return Request(id="r", prompt=mixed_prompts(parts)[0], sampling=SAMPLING, n=2)


async def switch(times: int) -> None:
    for _ in range(times):
        await asyncio.sleep(0)


@pytest.mark.parametrize("cache", ["slots", "pages"])
def test_a_paused_engine_waits_and_goes_on_where_it_was(cache: str) -> None:
    parts = tiny("qwen3_vl")
    options = {"cache": cache, **({"page_tokens": 16} if cache == "pages" else {})}

    async def paused(engine: EmbeddedEngine) -> list[Completion]:
        drawing = asyncio.ensure_future(engine.generate(request(parts)))
        await switch(5)
        await engine.pause()
        await switch(SWITCHES)
        assert not drawing.done()
        await engine.resume()
        return list(await drawing)

    found = wait_for(paused(make_engine(parts, **options)))
    (expected,) = generate(make_engine(parts, **options), [request(parts).prompt], [SAMPLING], 2)
    assert same(found, expected)


def test_an_engine_that_sleeps_takes_no_request_until_it_wakes() -> None:
    parts = tiny("qwen3_vl")
    engine = make_engine(parts, cache="pages", page_tokens=16)

    async def nap() -> int:
        before = await engine.generate(request(parts))
        await engine.sleep()
        assert engine._cache is None, "the pages are the update's"
        with pytest.raises(EngineError, match="asleep; call wake first"):
            await engine.generate(request(parts))
        await engine.wake()
        after = await engine.generate(request(parts))
        assert same(before, after)
        return len(after)

    assert wait_for(nap()) == 2


def test_an_engine_that_draws_cannot_sleep_but_can_be_closed() -> None:
    parts = tiny("qwen3_vl")

    async def close_in_the_middle() -> None:
        engine = make_engine(parts)
        drawing = asyncio.ensure_future(engine.generate(request(parts)))
        await switch(3)
        with pytest.raises(EngineError, match="sleep was called while the engine is generating"):
            await engine.sleep()
        await engine.close()
        with pytest.raises((EngineError, asyncio.CancelledError)):
            await drawing

    wait_for(close_in_the_middle())
