"""Requests for completions in an engine's OpenAI-compatible server, before its handlers: bans, limits and images."""

from __future__ import annotations

import json
import os
from typing import Any

from fovea.data.fetch import UrlLimits
from fovea.rollout.asgi import App, Message, Receive, Send, refuse, whole_body
from fovea.rollout.server import BANNED_IDS_ENV, URL_LIMITS_ENV
from fovea.rollout.server_images import ImageRefusedError, replace_addresses

PATHS = ("/v1/chat/completions", "/v1/completions")
LOWEST_BIAS = -100.0
"""Of OpenAI's interface: it leaves a token e^-100 of its probability."""
MAX_BODY_BYTES = 64 << 20
"""Of a request: a hundred photographs of half a MiB."""
BAD_REQUEST, TOO_LARGE = 400, 413


class Bans:
    """ASGI middleware that adds a `logit_bias` against banned ids to every request for completions.

    vLLM and SGLang read no `suppress_tokens` from a generation config. Images by address are refused, or read here.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._bias = {str(index): LOWEST_BIAS for index in json.loads(os.environ[BANNED_IDS_ENV])}
        limits = os.environ.get(URL_LIMITS_ENV)
        self._url_limits = None if limits is None else UrlLimits(**json.loads(limits))

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in PATHS:
            return await self._app(scope, receive, send)
        body = await whole_body(receive, MAX_BODY_BYTES)
        if body is None:
            return await refuse(send, TOO_LARGE, b"a request of more than %d bytes" % MAX_BODY_BYTES)
        request = _parsed(body)
        if request is None:
            return await refuse(send, BAD_REQUEST, b"the request is no JSON object")
        try:
            await replace_addresses(request.get("messages"), self._url_limits)
        except ImageRefusedError as error:
            return await refuse(send, BAD_REQUEST, error.args[0])
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
