"""Calls of middleware in front of an application that answers everybody."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fovea.rollout.server_guard import App, Message, Receive, Send
from fovea_gym.utils.event_loop import wait_for


async def everybody(_scope: Message, _receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})


def status(middleware: Callable[[App], App], path: str, **headers: str) -> int:
    """What a call with these headers, their dashes as underscores, is answered with."""
    return wait_for(status_of(middleware(everybody), path, **headers))


async def status_of(app: App, path: str, *, body: bytes = b"", app_state: Any = None, **headers: str) -> int:
    sent: list[Any] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": body}

    async def send(message: Message) -> None:
        sent.append(message)

    given = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": "POST", "path": path, "headers": given, "app": app_state}
    await app(scope, receive, send)
    return int(sent[0]["status"])
