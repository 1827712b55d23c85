"""ASGI, the interface between a web server and its applications, for middleware of engines' servers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

Message: TypeAlias = MutableMapping[str, Any]
"""A request's description, or an event of it."""
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Message, Receive, Send], Awaitable[None]]


def header(scope: Message, name: bytes) -> bytes:
    """The value of a request's header, by its name in small letters; empty where it is not given."""
    value: bytes = dict(scope["headers"]).get(name, b"")
    return value


async def refuse(send: Send, status: int, reason: bytes) -> None:
    """Answer a request with a status code, and with the reason as JSON."""
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b'{"error": "%s"}' % reason})
