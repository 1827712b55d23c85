"""Guard of an engine's web server: who may call it, and what a request may contain."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import os
import re
import secrets
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

from fovea.rollout.server import ADMIN_KEY_ENV, API_KEY_ENV, BANNED_IDS_ENV, URL_LIMITS_ENV
from fovea_gym.errors import BadRowError, ConfigError
from fovea_gym.rows.access import UrlLimits
from fovea_gym.rows.fetch import fetch
from fovea_gym.rows.images import ImageOpener
from fovea_gym.types import ImageRef
from fovea_gym.utils.addresses import is_loopback

Message: TypeAlias = MutableMapping[str, Any]
"""The ASGI scope of a request, or one of its events."""
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Message, Receive, Send], Awaitable[None]]


def header(scope: Message, name: bytes) -> bytes:
    """Return the value of a request header by its lower-case name; empty if the header is missing."""
    value: bytes = dict(scope["headers"]).get(name, b"")
    return value


async def answer(send: Send, status: int, body: bytes) -> None:
    """Answer a request with a status code and a JSON body."""
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def refuse(send: Send, status: int, reason: bytes) -> None:
    """Refuse a request with a status code and the reason, as JSON."""
    await answer(send, status, b'{"error": "%s"}' % reason)


async def whole_body(receive: Receive, max_bytes: float = math.inf) -> bytes | None:
    """Read the body of a request; returns None as soon as it is longer than `max_bytes`."""
    chunks, num_bytes, has_more = list[bytes](), 0, True
    while has_more:
        message = await receive()
        chunks.append(message.get("body", b""))
        num_bytes += len(chunks[-1])
        if num_bytes > max_bytes:
            return None
        has_more = message.get("more_body", False)
    return b"".join(chunks)


HEALTH = "/health"
COMPLETIONS = ("/v1/chat/completions", "/v1/completions")
ASKING = (*COMPLETIONS, "/v1/models", "/metrics")
"""Paths for ordinary clients. All others are for administration: some write files or replace the model, even by GET."""
MAX_BODY_BYTES = 64 << 20
"""Maximum size of a request: about a hundred photographs of half a MiB."""
LOWEST_BIAS = -100.0
"""Lowest bias of OpenAI's API: it multiplies a token's probability by e^-100."""
BAD_REQUEST, UNAUTHORIZED, FORBIDDEN, TOO_LARGE = 400, 401, 403, 413


class RefusedError(Exception):
    """A refused call, with the status code and the reason for the response."""

    def __init__(self, status: int, reason: bytes) -> None:
        super().__init__(status, reason)
        self.status, self.reason = status, reason


class Guard:
    """ASGI middleware: clients with the API key may request completions, those with the admin key may call any path.

    A server without an API key, which listens on loopback, refuses requests that a browser sends for a web page, also
    for a page whose host name resolves to this machine (DNS rebinding).

    Requests for completions are limited in size, and images given by address are either refused or fetched here. Banned
    ids get a `logit_bias`, because vLLM and SGLang do not read `suppress_tokens` from a generation config.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._api_key, self._admin_key = (_bearer(os.environ.get(name)) for name in (API_KEY_ENV, ADMIN_KEY_ENV))
        self._bias = {str(index): LOWEST_BIAS for index in json.loads(os.environ[BANNED_IDS_ENV])}
        limits = os.environ.get(URL_LIMITS_ENV)
        self._url_limits = None if limits is None else UrlLimits(**json.loads(limits))

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close"})  # closing before accepting sends status 403
        if scope["type"] != "http" or scope["path"] == HEALTH:
            return await self._app(scope, receive, send)
        try:
            self._check_caller(scope)
            if scope["method"] == "POST" and scope["path"] in COMPLETIONS:
                body = await self._checked_body(receive)
                headers = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
                headers.append((b"content-length", str(len(body)).encode()))
                scope, receive = {**scope, "headers": headers}, _first(body, receive)
        except RefusedError as error:
            return await refuse(send, error.status, error.reason)
        return await self._app(scope, receive, send)

    def _check_caller(self, scope: Message) -> None:
        given = header(scope, b"authorization")
        if self._admin_key and secrets.compare_digest(given, self._admin_key):
            return
        if self._api_key is None and _is_of_a_page(scope):
            raise RefusedError(FORBIDDEN, b"web pages may not call this server; start it with --api-key-env")
        if self._api_key and not secrets.compare_digest(given, self._api_key):
            raise RefusedError(UNAUTHORIZED, b"Unauthorized")
        if scope["path"] not in ASKING:
            raise RefusedError(FORBIDDEN, b"this server answers only %s" % ", ".join(ASKING).encode())

    async def _checked_body(self, receive: Receive) -> bytes:
        """Read a request for completions; returns its body with biases for banned ids, and with addresses replaced."""
        body = await whole_body(receive, MAX_BODY_BYTES)
        if body is None:
            raise RefusedError(TOO_LARGE, b"the request has more than %d bytes" % MAX_BODY_BYTES)
        try:
            request = json.loads(body)
        except (ValueError, RecursionError):  # not JSON, or nested too deeply
            request = None
        if not isinstance(request, dict):
            raise RefusedError(BAD_REQUEST, b"the request is not a JSON object")
        await replace_addresses(request.get("messages"), self._url_limits)
        given = request.get("logit_bias")
        return json.dumps({**request, "logit_bias": (given if isinstance(given, dict) else {}) | self._bias}).encode()


def _first(body: bytes, receive: Receive) -> Receive:
    """A `receive` that returns this body first, then calls the given one, which reports a disconnecting client."""
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive_body() -> Message:
        return next(messages, None) or await receive()

    return receive_body


def _bearer(key: str | None) -> bytes | None:
    return f"Bearer {key}".encode() if key else None


def _is_of_a_page(scope: Message) -> bool:
    """True if a browser may have sent a call for a web page; requests for images in a page have no Origin header."""
    host = re.fullmatch(rb"\[?(.*?)\]?(:\d*)?", header(scope, b"host"))
    site = header(scope, b"sec-fetch-site")
    is_elsewhere = host is None or not is_loopback(host[1].decode("latin-1").lower())
    return is_elsewhere or bool(header(scope, b"origin")) or site not in (b"", b"same-origin", b"none")


SOURCES = ("url", "image", "video", "audio")
"""Keys in messages, or endings of keys such as `image_url`, under which engines accept the addresses of files."""
IMAGE = "image_url"
MAX_ADDRESSES = 16
"""Maximum number of images by address in one request; they are fetched one after another."""
MAX_BYTES = 48 << 20
"""Maximum size of all images by address in one request; as base64, they are as large as the largest request."""
MAX_MEGAPIXELS = 64.0

# one text for all failures, so that it does not reveal what exists at an address
UNREADABLE = b"an image could not be read at its address; send it as a data: URL"


async def replace_addresses(messages: Any, limits: UrlLimits | None) -> None:
    """Replace image addresses by data: URLs with the fetched images; RefusedError if one may not or cannot be fetched.

    Without `limits`, every address is refused. The engines themselves would fetch addresses in this machine's network,
    and SGLang would even open local files.
    """
    found = list(_addresses(messages))
    if not found:
        return
    if limits is None:
        raise RefusedError(BAD_REQUEST, b"send images as data: URLs; this server opens no addresses or files")
    if not all(is_image for _, _, is_image in found):
        reason = (
            b"send images as image_url, with a data:, http:// or https:// URL; this server opens no other addresses"
        )
        raise RefusedError(BAD_REQUEST, reason)
    if len(found) > MAX_ADDRESSES:
        raise RefusedError(BAD_REQUEST, b"the request has more than %d images by address" % MAX_ADDRESSES)
    opener, num_bytes = ImageOpener(max_image_mib=limits.max_image_mib, max_image_megapixels=MAX_MEGAPIXELS), 0
    for holder, key, _ in found:
        try:
            # in a thread, so that the server keeps answering other requests
            content = await asyncio.to_thread(fetch, holder[key], IMAGE, limits)
            opener.size(ImageRef(source=content))  # checks the size in the file's header; the engine decodes the image
        except BadRowError as error:
            raise RefusedError(BAD_REQUEST, UNREADABLE) from error
        num_bytes += len(content)
        if num_bytes > MAX_BYTES:
            raise RefusedError(BAD_REQUEST, b"the images by address have more than %d bytes in all" % MAX_BYTES)
        holder[key] = f"data:image/*;base64,{base64.b64encode(content).decode()}"


def _addresses(messages: Any) -> Iterator[tuple[dict[str, Any], str, bool]]:
    """Find file addresses in messages: the dictionary, its key, and True for the address of an image."""
    left = [("", messages)]
    while left:
        name, part = left.pop()
        if isinstance(part, list):
            left.extend((name, each) for each in part)
        elif isinstance(part, dict):
            left.extend(part.items())
            for key, value in part.items():
                if key.endswith(SOURCES) and isinstance(value, str) and not value.startswith("data:"):
                    yield part, key, key == IMAGE or (name, key) == (IMAGE, "url")


KEY_FILE = "server-key"
"""File with the admin key, in the folder of weight syncs."""


def made_key(folder: Path) -> str:
    """The admin key of the servers that share a folder, created on first use; ConfigError if others may read it."""
    file = folder / KEY_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            # under another name until it is complete; a key that exists by then is kept
            with TemporaryDirectory(dir=folder) as scratch:
                new = Path(scratch) / KEY_FILE
                new.touch(mode=0o600)
                new.write_text(secrets.token_hex(16))
                with suppress(FileExistsError):
                    file.hardlink_to(new)
        status = file.stat()
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise ConfigError(
                f"{file}: other users may know this key of the servers; delete it, and restart all servers"
            )
        return file.read_text().strip()
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}; the user who trains and serves must own it") from error
