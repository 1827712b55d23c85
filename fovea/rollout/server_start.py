"""Which start of an engine's server a call is for: one that was started again has the weights of its files alone."""

from __future__ import annotations

import os

from fovea.rollout.asgi import App, Message, Receive, Send, header, refuse

START_ENV = "FOVEA_SERVER_START"
"""Environment variable of a server's processes: a name of this start, which no other start has."""
START_HEADER = "x-fovea-start"
"""Header of a call with the name of the start that it is for."""
CONFLICT = 409


class SameStart:
    """ASGI middleware that refuses calls for another start of this server.

    A server that ends and is started again between two calls is not missed: without this its first answers would come
    from the weights of its files.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._start = os.environ[START_ENV].encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and header(scope, START_HEADER.encode()) not in (b"", self._start):
            return await refuse(send, CONFLICT, b"this server was started again, and has not got the weights since")
        return await self._app(scope, receive, send)
