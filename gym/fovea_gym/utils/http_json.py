"""Calls of a JSON server, with limits on their number and time, and with retries if these may help."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx2

from fovea_gym.errors import ConfigError
from fovea_gym.utils.addresses import is_loopback

MAY_PASS = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
"""Status codes of a server that is busy or still starting."""
FIRST_PAUSE_SECONDS = 0.5
MAX_PAUSE_SECONDS = 30.0
SHOWN_CHARS = 200


class CallError(Exception):
    """A call failed in all tries."""

    def __init__(self, problem: str, *, status: int | None = None) -> None:
        super().__init__(problem)
        self.status = status
        """The status code of the last response; None if there was no response."""

    @property
    def may_pass(self) -> bool:
        """True if another try may succeed."""
        return self.status is None or self.status in MAY_PASS


@dataclass(frozen=True, slots=True, kw_only=True)
class CallBounds:
    """Limits of the calls to one server."""

    timeout_seconds: float
    """Time limit of one try."""
    calls_at_once: int
    max_retries: int = 0
    """Retries after a timeout, a broken connection or a status in `MAY_PASS`, with growing pauses."""
    max_reply_bytes: int = 1 << 28


class JsonServer:
    """A client of one server; all of its calls, and its close, are made on one event loop."""

    def __init__(self, url: str, bounds: CallBounds, headers: Mapping[str, str] | None = None) -> None:
        self.url = url
        self._bounds = bounds
        self._slots = asyncio.Semaphore(bounds.calls_at_once)
        # no redirects, since they could send the key to another host
        self._client = httpx2.AsyncClient(
            headers={"content-type": "application/json", **(headers or {})},
            timeout=None,
            follow_redirects=False,
            limits=httpx2.Limits(max_connections=bounds.calls_at_once + 1),
            # ignore HTTP_PROXY for localhost: the proxy would connect to its own localhost
            trust_env=not is_loopback(httpx2.URL(url).host),
        )

    async def close(self) -> None:
        """Close the client's connections."""
        await self._client.aclose()

    async def get(self, path: str) -> Any:
        """GET the JSON at a path; raises CallError."""
        return await self._call("GET", path, None)

    async def post(
        self, path: str, body: Mapping[str, Any] | None = None, headers: Mapping[str, str] | None = None
    ) -> Any:
        """POST a body and return the JSON response, None if it is empty; raises CallError.

        `headers` are sent with this call only.
        """
        content = None if body is None else json.dumps(body).encode("utf-8", "replace")
        async with self._slots:
            return await self._call("POST", path, content, headers)

    async def _call(
        self, method: str, path: str, content: bytes | None, headers: Mapping[str, str] | None = None
    ) -> Any:
        for num_failed in range(self._bounds.max_retries):
            try:
                return await self._try(method, path, content, headers)
            except CallError as error:
                if not error.may_pass:
                    raise
            await asyncio.sleep(min(FIRST_PAUSE_SECONDS * 2**num_failed, MAX_PAUSE_SECONDS))
        return await self._try(method, path, content, headers)

    async def _try(self, method: str, path: str, content: bytes | None, headers: Mapping[str, str] | None) -> Any:
        try:
            async with asyncio.timeout(self._bounds.timeout_seconds):
                call = self._client.stream(method, self.url + path, content=content, headers=headers)
                async with call as response:
                    answer = await _bounded(response, self._bounds.max_reply_bytes)
        except TimeoutError as error:
            raise CallError(f"no answer within {self._bounds.timeout_seconds:g} s") from error
        except httpx2.HTTPError as error:
            raise CallError(f"{type(error).__name__}: {error}") from error
        if response.status_code != httpx2.codes.OK:
            raise CallError(f"status {response.status_code} ({_shown(answer)})", status=response.status_code)
        return _parsed(answer)


def bearer(api_key_env: str | None, setting: str) -> dict[str, str]:
    """The header with the key from an environment variable; ConfigError naming `setting` if the variable has no key."""
    if api_key_env is None:
        return {}
    key = os.environ.get(api_key_env, "").strip()
    if not key:
        raise ConfigError(
            f"{setting}={api_key_env}, but there is no such environment variable; export it, or drop the setting"
        )
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(
            f"{setting}={api_key_env}: the key in that environment variable has characters that an HTTP header cannot "
            "contain, such as letters with accents or line breaks; copy it again"
        )
    return {"authorization": f"Bearer {key}"}


async def _bounded(response: httpx2.Response, max_bytes: int) -> bytes:
    content = bytearray()
    async for chunk in response.aiter_bytes():
        content += chunk
        if len(content) > max_bytes:
            raise CallError(f"an answer of more than {max_bytes} bytes", status=response.status_code)
    return bytes(content)


def _parsed(content: bytes) -> Any:
    if not content:
        return None
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CallError(f"an answer that is not JSON ({_shown(content)})", status=httpx2.codes.OK) from error


def _shown(content: bytes) -> str:
    """The start of an answer, as one line."""
    return repr(content[:SHOWN_CHARS].decode("utf-8", "replace"))
