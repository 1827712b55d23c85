"""Bans of token ids in an engine's OpenAI-compatible server, in front of its handlers."""

from __future__ import annotations

import json
import os

from fovea.rollout.asgi import App, Message, Receive, Send
from fovea.rollout.server import BANNED_IDS_ENV

PATHS = ("/v1/chat/completions", "/v1/completions")
LOWEST_BIAS = -100.0
"""Of OpenAI's interface: it leaves a token e^-100 of its probability."""


class Bans:
    """ASGI middleware that adds a `logit_bias` against banned ids to every request for completions.

    vLLM and SGLang read no `suppress_tokens` from a generation config.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._bias = {str(index): LOWEST_BIAS for index in json.loads(os.environ[BANNED_IDS_ENV])}

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in PATHS:
            return await self._app(scope, receive, send)
        body = await _whole_body(receive)
        changed = self._with_bans(body)
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

    def _with_bans(self, body: bytes) -> bytes:
        try:
            request = json.loads(body)
        except (ValueError, RecursionError):  # no JSON, or too deep
            return body  # the engine says what is wrong with it
        if not isinstance(request, dict):
            return body
        given = request.get("logit_bias")
        return json.dumps({**request, "logit_bias": (given if isinstance(given, dict) else {}) | self._bias}).encode()


async def _whole_body(receive: Receive) -> bytes:
    body, has_more = b"", True
    while has_more:
        message = await receive()
        body += message.get("body", b"")
        has_more = message.get("more_body", False)
    return body
