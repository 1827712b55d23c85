"""Coroutines from ordinary code, and how they end."""

from __future__ import annotations

import asyncio
import gc

import pytest

from fovea.utils.event_loop import gather_or_cancel, wait_for


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
