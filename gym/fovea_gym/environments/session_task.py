"""One task of an event loop for all calls of a session: cancel scopes of anyio (MCP) need a single task."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias, TypeVar

from fovea_gym.utils.event_loop import BackgroundLoop

Result = TypeVar("Result")
Make: TypeAlias = Callable[[], Awaitable[Result]]


class SessionTask:
    """Calls in one task of a background loop, awaited on another; a cancelled caller ends its call, not the task."""

    def __init__(self, loop: BackgroundLoop) -> None:
        self._loop = loop
        self._task: asyncio.Task[None] | None = None
        self._calls: asyncio.Queue[tuple[Make[Any], asyncio.Future[Any]]] = asyncio.Queue()
        self._running: asyncio.Future[Any] | None = None

    async def call(self, make: Make[Result]) -> Result:
        """The result of a call."""
        return await self._loop.run(self._ask(make))

    async def last_call(self, make: Make[Result]) -> Result:
        """The result of a call after which the task ends; it runs to its end if the caller is cancelled meanwhile."""
        return await self._loop.run_to_end(self._ask_last(make))

    async def _ask_last(self, make: Make[Result]) -> Result:
        try:
            return await self._ask(make)
        finally:
            if self._task is not None:
                self._task.cancel()

    async def _ask(self, make: Make[Result]) -> Result:
        if self._task is None:
            self._task = asyncio.create_task(self._serve())
        answer: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._calls.put_nowait((make, answer))
        try:
            return await answer
        except asyncio.CancelledError:
            if self._running is answer:
                self._task.cancel()
            raise

    async def _serve(self) -> None:
        while True:
            make, answer = await self._calls.get()
            if not answer.cancelled():
                await self._answer(make, answer)

    async def _answer(self, make: Make[Any], answer: asyncio.Future[Any]) -> None:
        self._running = answer
        try:
            result = await make()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or not answer.cancelled():
                answer.cancel()
                raise
            task.uncancel()
        except Exception as error:
            if not answer.cancelled():
                answer.set_exception(error)
        else:
            if not answer.cancelled():
                answer.set_result(result)
        finally:
            self._running = None
