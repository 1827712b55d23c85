"""Coroutines from ordinary code, and how they end."""

from __future__ import annotations

import asyncio
import gc

import pytest

from fovea.utils.event_loop import wait_for


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
