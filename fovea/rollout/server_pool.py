"""Several servers of one engine as one: a call goes to the one with the least to do, and to another if that is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from fovea.errors import EngineError, LostEngineError
from fovea_gym.errors import named
from fovea_gym.utils.event_loop import gather_or_cancel
from fovea_gym.utils.http_json import CallError, JsonServer
from fovea_gym.utils.shown_text import printable, without_secrets

LOG = logging.getLogger(__name__)
MAX_TRIES = 10
"""Of one call: one that ends every server that it comes to must not go on for ever."""
FIRST_PAUSE_SECONDS = 0.25
MAX_PAUSE_SECONDS = 5.0

Parse: TypeAlias = Callable[[Any], Any]
"""Parses a response; None if the server was shut down before it was complete."""
Prepare: TypeAlias = Callable[[JsonServer], Awaitable[None]]
"""Makes a server ready for calls: CallError where it does not answer, EngineError where it is not fit."""


class TakenError(EngineError):
    """A server that another run has taken over: to wait for it would be of no use, and ends with an error at once."""


def understood(server: JsonServer, path: str) -> AbstractContextManager[None]:
    """Block in which an answer of a server is read; an EngineError names one of another form than is expected."""
    return named(
        lambda error: EngineError(
            f"{server.url}{path} sends an unexpected response ({type(error).__name__}: {error}); it must be a server "
            "of `fovea serve --for-training`, with the same package versions as here"
        )
    )


@dataclass(slots=True, eq=False)
class PooledServer:
    """A server of the pool."""

    server: JsonServer
    load: int = 0
    """Queued work, in the units of `ServerPool.post`."""
    is_ready: bool = False
    num_prepared: int = 0
    """How often it was made ready."""
    problem: str = "it has not been contacted yet"
    """Why it is not ready."""


@dataclass(slots=True)
class ServerPool:
    """Calls of several servers; all of them are made on one event loop."""

    members: Sequence[PooledServer]
    prepare: Prepare
    """Called before a server gets its first call, and again after it was lost."""
    restart_seconds: float
    """Longest time for which a call waits where no server is ready."""
    _taken: TakenError | None = None
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    _returning: set[asyncio.Task[None]] = field(default_factory=set)

    async def start(self) -> None:
        """Wait until all servers answer and are prepared; EngineError for one that is not fit, or not there in time."""
        try:
            async with asyncio.timeout(self.restart_seconds):
                await gather_or_cancel(self._until_ready(member, CallError) for member in self.members)
        except TimeoutError as error:
            raise EngineError(
                f"not all servers are ready: {self._problems()}; start them, or raise "
                f"rollout.engine.restart_seconds={self.restart_seconds:g}"
            ) from error

    async def post(
        self, path: str, body: Mapping[str, Any], *, headers: Mapping[str, str], load: int, parse: Parse
    ) -> Any:
        """The whole answer of a server, parsed, to a call that adds `load` to what it has to do.

        A call whose server is lost is made again, from the start, of another. LostEngineError where none is
        ready for `restart_seconds`, EngineError where each refuses the call or is lost with it, TakenError where
        another run has taken a server.
        """
        for _ in range(MAX_TRIES):
            member = await self._least_loaded()
            member.load += load
            num_prepared = member.num_prepared
            try:
                answer = await member.server.post(path, body, headers)
                with understood(member.server, path):
                    parsed = parse(answer)
                if parsed is not None:
                    return parsed
                self._lose(member, CallError("it aborted a request"), num_prepared)
            except CallError as error:
                if not error.may_pass:
                    raise EngineError(f"{member.server.url} refuses a request: {error}") from error
                self._lose(member, error, num_prepared)
            finally:
                member.load -= load
        raise EngineError(
            f"a request failed on each of the {MAX_TRIES} servers that it was sent to; not ready: {self._problems()}; "
            "see the servers' logs"
        )

    async def on_all(self, call: Callable[[JsonServer], Awaitable[None]]) -> None:
        """Make a call of every server that is ready; one that is lost meanwhile is prepared before it comes back.

        TakenError where another run has taken one.
        """
        self._check_not_taken()
        await gather_or_cancel(self._call(member, call) for member in self.members if member.is_ready)

    async def close(self) -> None:
        """Close the connections to all servers, which go on."""
        for task in self._returning:
            task.cancel()
        for member in self.members:
            await member.server.close()

    async def _call(self, member: PooledServer, call: Callable[[JsonServer], Awaitable[None]]) -> None:
        try:
            await call(member.server)
        except CallError as error:
            self._lose(member, error, member.num_prepared)

    async def _least_loaded(self) -> PooledServer:
        try:
            async with asyncio.timeout(self.restart_seconds), self._changed:
                await self._changed.wait_for(lambda: self._taken or any(member.is_ready for member in self.members))
        except TimeoutError as error:
            raise LostEngineError(
                f"no server was ready for rollout.engine.restart_seconds={self.restart_seconds:g}: "
                f"{self._problems()}; restart one, or raise this setting"
            ) from error
        self._check_not_taken()
        return min((member for member in self.members if member.is_ready), key=lambda member: member.load)

    def _check_not_taken(self) -> None:
        if self._taken is not None:
            raise self._taken

    def _lose(self, member: PooledServer, error: CallError, num_prepared: int) -> None:
        """Set a server aside for the failure of a call that began when it had been prepared so often."""
        # of a server that was lost and is back, the last calls before that may fail late
        if member.is_ready and member.num_prepared == num_prepared:
            member.is_ready, member.problem = False, str(error)
            _warn(member, f"is lost: {error}; the others take over its requests until it is back")
            task = asyncio.create_task(self._until_back(member))
            self._returning.add(task)
            task.add_done_callback(self._returning.discard)

    async def _until_back(self, member: PooledServer) -> None:
        try:
            # one that came back unfit may be started once more
            await self._until_ready(member, CallError, EngineError)
        except TakenError as error:
            self._taken = error
            async with self._changed:
                self._changed.notify_all()
        else:
            _warn(member, "is back, with the current weights")

    async def _until_ready(self, member: PooledServer, *passing: type[Exception]) -> None:
        """Prepare a server, again after an error that is `passing`, until it is ready."""
        pause = FIRST_PAUSE_SECONDS
        while not member.is_ready:
            try:
                await self.prepare(member.server)
                member.is_ready, member.num_prepared = True, member.num_prepared + 1
            except TakenError:
                raise
            except passing as error:
                member.problem = str(error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, MAX_PAUSE_SECONDS)
        async with self._changed:
            self._changed.notify_all()

    def _problems(self) -> str:
        return "; ".join(f"{each.server.url}: {each.problem}" for each in self.members if not each.is_ready)


def _warn(member: PooledServer, text: str) -> None:
    LOG.warning("%s", printable(without_secrets(f"rollout.engine.servers: {member.server.url} {text}")))
