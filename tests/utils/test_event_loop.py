"""Coroutines from ordinary code, and how they end."""

from __future__ import annotations

import asyncio
import gc
from threading import Event

import pytest

from fovea.utils.event_loop import BackgroundLoop, gather_or_cancel, wait_for


async def press_ctrl_c() -> None:
    raise KeyboardInterrupt


async def several() -> None:
    await asyncio.gather(*(press_ctrl_c() for _ in range(3)), asyncio.sleep(10))


def test_ctrl_c_is_raised_once_and_not_logged_for_every_task(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(KeyboardInterrupt):
        wait_for(several())
    gc.collect()
    assert caplog.records == []


def test_a_result_comes_back_and_an_error_as_it_is() -> None:
    async def fail() -> None:
        raise ValueError("so")

    assert wait_for(asyncio.sleep(0, result=3)) == 3
    with pytest.raises(ValueError, match="so"):
        wait_for(fail())


def test_what_an_error_leaves_pending_has_ended_when_it_is_raised() -> None:
    ended: list[str] = []

    async def slow() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            ended.append("slow")

    async def fails() -> None:
        await asyncio.sleep(0)
        raise ValueError("so")

    async def both() -> None:
        await asyncio.gather(slow(), fails())

    with pytest.raises(ValueError, match="so"):
        wait_for(both())
    assert ended == ["slow"]


def test_gather_or_cancel_ends_the_others_before_it_raises() -> None:
    ended: list[str] = []

    async def slow() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("slow")

    async def fails() -> None:
        await asyncio.sleep(0)
        raise ValueError("the second of two")

    async def both() -> list[str]:
        with pytest.raises(ValueError, match="the second of two"):
            await gather_or_cancel([slow(), fails()])
        return list(ended)

    assert asyncio.run(both()) == ["slow"]


def test_gather_or_cancel_returns_the_results_in_order() -> None:
    async def after(turns: int) -> int:
        for _ in range(turns):
            await asyncio.sleep(0)
        return turns

    assert asyncio.run(gather_or_cancel(after(turns) for turns in (3, 1, 2))) == [3, 1, 2]


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
    async def one() -> int:
        return 1

    loop = BackgroundLoop("tested")
    assert loop.wait(one()) == 1
    loop.close()
    assert loop.wait(one()) == 1
    loop.close()
