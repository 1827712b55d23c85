"""Requests for completions in an engine's OpenAI-compatible server, before its handlers: bans and limits."""

from __future__ import annotations

import json
import os
from typing import Any

from fovea.rollout.asgi import App, Message, Receive, Send, refuse, whole_body
from fovea.rollout.server import BANNED_IDS_ENV

PATHS = ("/v1/chat/completions", "/v1/completions")
LOWEST_BIAS = -100.0
"""Of OpenAI's interface: it leaves a token e^-100 of its probability."""
MAX_BODY_BYTES = 64 << 20
"""Of a request: a hundred photographs of half a MiB."""
BAD_REQUEST, TOO_LARGE = 400, 413
SOURCES = ("url", "image", "video", "audio")
"""Names in messages, or their ends as in `image_url`, under which engines take files by address."""


class Bans:
    """ASGI middleware that adds a `logit_bias` against banned ids to every request for completions.

    vLLM and SGLang read no `suppress_tokens` from a generation config. Images by address are refused: both engines
    fetch from this machine and its network, and SGLang opens files.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._bias = {str(index): LOWEST_BIAS for index in json.loads(os.environ[BANNED_IDS_ENV])}

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in PATHS:
            return await self._app(scope, receive, send)
        body = await whole_body(receive, MAX_BODY_BYTES)
        if body is None:
            return await refuse(send, TOO_LARGE, b"a request of more than %d bytes" % MAX_BODY_BYTES)
        request = _parsed(body)
        if request is None:
            return await refuse(send, BAD_REQUEST, b"the request is no JSON object")
        if _names_an_address(request.get("messages")):
            return await refuse(
                send, BAD_REQUEST, b"images come as data: URLs; this server opens no addresses or files"
            )
        changed = self._with_bans(request)
        headers = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
        headers.append((b"content-length", str(len(changed)).encode()))
        given = False

        async def receive_changed() -> Message:
            nonlocal given
            if given:
                return await receive()  # tells of a client that hangs up
            given = True
            return {"type": "http.request", "body": changed, "more_body": False}

        await self._app({**scope, "headers": headers}, receive_changed, send)

    def _with_bans(self, request: dict[str, Any]) -> bytes:
        given = request.get("logit_bias")
        return json.dumps({**request, "logit_bias": (given if isinstance(given, dict) else {}) | self._bias}).encode()


def _parsed(body: bytes) -> dict[str, Any] | None:
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):  # no JSON, or too deep
        return None
    return request if isinstance(request, dict) else None


def _names_an_address(messages: Any) -> bool:
    """Whether anything in messages is to be fetched or opened, rather than given as data."""
    left = [messages]
    while left:
        part = left.pop()
        if isinstance(part, list):
            left.extend(part)
        elif isinstance(part, dict):
            left.extend(part.values())
            sources = (value for name, value in part.items() if name.endswith(SOURCES))
            if any(isinstance(value, str) and not value.startswith("data:") for value in sources):
                return True
    return False
