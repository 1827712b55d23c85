"""Calls of middleware in front of an application that answers everybody."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fovea.rollout.asgi import App, Message, Receive, Send
from fovea.utils.event_loop import wait_for


async def everybody(_scope: Message, _receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})


def status(middleware: Callable[[App], App], path: str, **headers: str) -> int:
    """What a call with these headers, their dashes as underscores, is answered with."""
    sent: list[Any] = []

    async def receive() -> Message:
        return {}

    async def send(message: Message) -> None:
        sent.append(message)

    given = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    wait_for(middleware(everybody)({"type": "http", "path": path, "headers": given}, receive, send))
    return int(sent[0]["status"])
