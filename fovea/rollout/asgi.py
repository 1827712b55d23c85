"""ASGI, the interface between a web server and its applications, for middleware of engines' servers."""

from __future__ import annotations

import math
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


async def answer(send: Send, status: int, body: bytes) -> None:
    """Answer a request with a status code and JSON."""
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def refuse(send: Send, status: int, reason: bytes) -> None:
    """Answer a request with a status code, and with the reason as JSON."""
    await answer(send, status, b'{"error": "%s"}' % reason)


async def whole_body(receive: Receive, max_bytes: float = math.inf) -> bytes | None:
    """The body of a request; None as soon as it is longer than `max_bytes`."""
    chunks, num_bytes, has_more = list[bytes](), 0, True
    while has_more:
        message = await receive()
        chunks.append(message.get("body", b""))
        num_bytes += len(chunks[-1])
        if num_bytes > max_bytes:
            return None
        has_more = message.get("more_body", False)
    return b"".join(chunks)
