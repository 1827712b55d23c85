"""The server of `fovea view`, on this machine's own address only."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from fovea.errors import ConfigError
from fovea.view.app import HOSTS

HEADER_SECONDS = 5.0


class TimedHeaders(H11Protocol):
    """A connection that is closed where a request has not begun or its headers are not complete for HEADER_SECONDS.

    uvicorn itself has a limit between two requests only: connections that send nothing would use up all open files.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._look()

    def _look(self, before: object = ()) -> None:
        cycle = cast(RequestResponseCycle | None, self.cycle)  # None before the first request
        waits = cycle is None or cycle.response_complete
        if (waits, cycle) == (True, before):
            self.transport.close()
        elif not self.transport.is_closing():
            self.loop.call_later(HEADER_SECONDS, self._look, cycle if waits else ())


def serve(app: ASGIApp, port: int, say: Callable[[str], None]) -> None:
    """Serve a page until Ctrl-C; `say` gets its address. Port 0 takes any that is free.

    ConfigError where the port is taken.
    """
    # asyncio turns Nagle's algorithm off where a connection is said to be TCP; on, most answers wait 40 ms for an ACK
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOSTS[0], port))
            listener.listen()  # who opens the address at once waits, and is not refused
        except OSError as error:
            raise ConfigError(
                f"--port {port}: {error.strerror}; give another one, or 0 for any that is free"
            ) from error
        say(f"http://{HOSTS[0]}:{listener.getsockname()[1]}/")
        config = uvicorn.Config(app, http=TimedHeaders, log_level="warning", access_log=False)
        server = uvicorn.Server(config)
        try:
            server.run(sockets=[listener])
        except KeyboardInterrupt:
            return  # uvicorn raises the signal again that has ended it
