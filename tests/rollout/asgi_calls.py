"""Calls of ASGI applications without a server."""

from __future__ import annotations

from typing import Any

from fovea.rollout.server_guard import App, Message, Receive, Send


async def everybody(_scope: Message, _receive: Receive, send: Send) -> None:
    """Application that answers everybody."""
    await send({"type": "http.response.start", "status": 200, "headers": []})


async def answer_of(app: App, path: str, *chunks: bytes, app_state: Any = None, **headers: str) -> tuple[int, bytes]:
    """Status and body of the answer to a POST of these chunks; headers have underscores for dashes."""
    sent, left = list[Any](), list(chunks or [b""])

    async def receive() -> Message:
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    async def send(message: Message) -> None:
        sent.append(message)

    given = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    await app({"type": "http", "method": "POST", "path": path, "headers": given, "app": app_state}, receive, send)
    return int(sent[0]["status"]), sent[-1].get("body", b"")
