"""The push of weights that a server for training holds: calls name it, and are refused where it is another one."""

from __future__ import annotations

import json
from typing import Any

from fovea.rollout.server_guard import App, Message, Receive, Send, answer, header, refuse, whole_body

PUSH_HEADER = "x-fovea-push"
"""Header of a call with the name of the push that it is for."""
RPC = "/collective_rpc"
FACTS, LOAD = "fovea_facts", "load_push"
"""The methods of `server_worker.FolderReceiver` that a trainer calls."""
FORBIDDEN, CONFLICT = 403, 409
OTHER_WEIGHTS = b"this server does not hold the weights of that push"


class SamePush:
    """ASGI middleware that refuses calls for a push that this server does not hold, and makes the calls of workers.

    A server that was started again holds none, and another run may have pushed its own: without this, completions
    would come from those weights. vLLM's own path would call any method of its workers.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._held = b""

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == RPC:
            return await self._call_workers(scope, receive, send)
        wanted = header(scope, PUSH_HEADER.encode()) if scope["type"] == "http" else b""
        if not wanted:
            return await self._app(scope, receive, send)
        if wanted != self._held:
            return await refuse(send, CONFLICT, OTHER_WEIGHTS)
        return await self._app(scope, receive, self._unless_changed(send))

    def _unless_changed(self, send: Send) -> Send:
        """A `send` that refuses a call, in place of its answer, if weights were loaded since it came."""
        held, is_refused = self._held, False

        async def checked(message: Message) -> None:
            nonlocal is_refused
            # by identity: the same push may have been loaded again after another one
            if message["type"] == "http.response.start" and self._held is not held:
                is_refused = True
                await refuse(send, CONFLICT, OTHER_WEIGHTS)
            elif not is_refused:
                await send(message)

        return checked

    async def _call_workers(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer with what a method of ours returns in each worker."""
        call = json.loads(await whole_body(receive) or b"{}")
        method, arguments = call.get("method"), call.get("args", [])
        if method not in (FACTS, LOAD):
            return await refuse(send, FORBIDDEN, b"only a trainer's own methods are called")
        results = await self._load(scope, arguments) if method == LOAD else await _on_workers(scope, FACTS, arguments)
        await answer(send, 200, json.dumps({"results": results}).encode())

    async def _load(self, scope: Message, arguments: list[Any]) -> list[dict[str, Any]]:
        try:
            results = await _on_workers(scope, LOAD, arguments)
        except BaseException:
            self._held = b""  # it may have broken off anywhere
            raise
        if not any("problem" in each for each in results):
            self._held = str(arguments[0]).encode()
        return results


async def _on_workers(scope: Message, method: str, arguments: list[Any]) -> list[dict[str, Any]]:
    engine = scope["app"].state.engine_client
    results: list[dict[str, Any]] = await engine.collective_rpc(method, args=tuple(arguments))
    return results
