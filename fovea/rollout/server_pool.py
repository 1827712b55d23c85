"""A pool of servers: a call goes to the server with the least load, and to another one if that server is lost."""

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
"""Attempts for one call: a call that crashes every server it reaches must not be repeated forever."""
FIRST_PAUSE_SECONDS = 0.25
MAX_PAUSE_SECONDS = 5.0

Parse: TypeAlias = Callable[[Any], Any]
"""Parses a response; None if the server was shut down before it was complete."""
Prepare: TypeAlias = Callable[[JsonServer], Awaitable[None]]
"""Makes a server ready for calls; CallError if it does not respond, EngineError if it is unsuitable."""


class TakenError(EngineError):
    """Another run has taken over a server; waiting for that server would not help, so this is raised at once."""


def understood(server: JsonServer, path: str) -> AbstractContextManager[None]:
    """Context manager for reading a server's response; raises EngineError if it does not have the expected form."""
    return named(
        lambda error: EngineError(
            f"{server.url}{path} sends an unexpected response ({type(error).__name__}: {error}); it must be a server "
            "of `fovea serve --for-training`, with the same package versions as here"
        )
    )


@dataclass(slots=True, eq=False)
class PooledServer:
    """One server of the pool, with its load and readiness."""

    server: JsonServer
    load: int = 0
    """Work in progress, in the units of `ServerPool.post`."""
    is_ready: bool = False
    num_prepared: int = 0
    """Number of times that the server was made ready."""
    problem: str = "it has not been contacted yet"
    """Reason why the server is not ready."""


@dataclass(slots=True)
class ServerPool:
    """Calls several servers, always on the same event loop."""

    members: Sequence[PooledServer]
    prepare: Prepare
    """Called before the first call to a server, and again after the server was lost."""
    restart_seconds: float
    """Maximum time for which a call waits for a server to become ready."""
    _taken: TakenError | None = None
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    _returning: set[asyncio.Task[None]] = field(default_factory=set)

    async def start(self) -> None:
        """Wait until all servers are prepared; EngineError if one is unsuitable or does not respond in time."""
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
        """Send a call that adds `load` to a server's work, and return the parsed response.

        If the server is lost, the call is repeated from the start on another one. Raises LostEngineError if no server
        is ready within `restart_seconds`, EngineError if a server refuses the call or if it fails MAX_TRIES times, and
        TakenError if another run has taken over a server.
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
        """Call every ready server; one lost meanwhile is prepared again first. TakenError if another run took one."""
        self._check_not_taken()
        await gather_or_cancel(self._call(member, call) for member in self.members if member.is_ready)

    async def close(self) -> None:
        """Close the connections to all servers; the servers keep running."""
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
        """Mark a server as lost after a failed call; `num_prepared` is its count when the call began."""
        # calls from before a server was lost may still fail after it is back
        if member.is_ready and member.num_prepared == num_prepared:
            member.is_ready, member.problem = False, str(error)
            _warn(member, f"is lost: {error}; the others take over its requests until it is back")
            task = asyncio.create_task(self._until_back(member))
            self._returning.add(task)
            task.add_done_callback(self._returning.discard)

    async def _until_back(self, member: PooledServer) -> None:
        try:
            # a server that came back unsuitable may be restarted
            await self._until_ready(member, CallError, EngineError)
        except TakenError as error:
            self._taken = error
            async with self._changed:
                self._changed.notify_all()
        else:
            _warn(member, "is back, with the current weights")

    async def _until_ready(self, member: PooledServer, *passing: type[Exception]) -> None:
        """Prepare a server until it is ready; after an error of a `passing` type, try again."""
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
