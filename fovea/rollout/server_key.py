"""Who may call an engine's server: on all of its paths, those with the key; without one, no web page."""

from __future__ import annotations

import os
import secrets

from fovea.rollout.asgi import App, Message, Receive, Send, header, refuse
from fovea.rollout.server import API_KEY_ENV

OPEN_PATHS = ("/health",)
UNAUTHORIZED = 401
FORBIDDEN = 403


class RequireKey:
    """ASGI middleware that answers requests with the key alone, where there is one.

    vLLM itself asks for it below /v1, /v2 and /inference only, and not where weights are changed. Without a key, a
    server on loopback refuses what a browser sends for a web page, which vLLM and SGLang let any page do.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        key = os.environ.get(API_KEY_ENV)
        self._expected = None if not key else f"Bearer {key}".encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        is_call = scope["type"] in ("http", "websocket") and scope["path"] not in OPEN_PATHS
        if is_call and self._expected is None and header(scope, b"origin"):
            return await refuse(send, FORBIDDEN, b"web pages may not call this server; start it with --api-key-env")
        if is_call and self._expected and not secrets.compare_digest(header(scope, b"authorization"), self._expected):
            return await refuse(send, UNAUTHORIZED, b"Unauthorized")
        return await self._app(scope, receive, send)
