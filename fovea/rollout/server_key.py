"""Access to an engine's server: asking with one key, administration with another; without a key, no web page."""

from __future__ import annotations

import os
import re
import secrets
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from fovea.errors import ConfigError
from fovea.rollout.asgi import App, Message, Receive, Send, header, refuse
from fovea.rollout.server import ADMIN_KEY_ENV, API_KEY_ENV
from fovea.utils.loopback import is_loopback

HEALTH = "/health"
ASKING = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/metrics")
"""Paths for whoever may ask. All others are administration: some write files, or replace the model, by GET too."""
UNAUTHORIZED, FORBIDDEN = 401, 403
KEY_FILE = "server-key"
"""File of the folder of pushes with the key of administration."""


class RequireKey:
    """ASGI middleware that lets those with a key ask, and those with the key of administration do everything.

    Without a key for asking, a server on loopback refuses what a browser sends for a web page, also for one whose name
    has come to lead to this machine (DNS rebinding).
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._api_key, self._admin_key = (_bearer(os.environ.get(name)) for name in (API_KEY_ENV, ADMIN_KEY_ENV))

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close"})  # before it is accepted: status 403
        if scope["type"] == "http" and scope["path"] != HEALTH and (refusal := self._refusal(scope)):
            return await refuse(send, *refusal)
        return await self._app(scope, receive, send)

    def _refusal(self, scope: Message) -> tuple[int, bytes] | None:
        """Status and reason of a call that is refused."""
        given = header(scope, b"authorization")
        if self._admin_key and secrets.compare_digest(given, self._admin_key):
            return None
        if self._api_key is None and _is_of_a_page(scope):
            return FORBIDDEN, b"web pages may not call this server; start it with --api-key-env"
        if self._api_key and not secrets.compare_digest(given, self._api_key):
            return UNAUTHORIZED, b"Unauthorized"
        if scope["path"] not in ASKING:
            return FORBIDDEN, b"this server answers %s only" % ", ".join(ASKING).encode()
        return None


def _bearer(key: str | None) -> bytes | None:
    return f"Bearer {key}".encode() if key else None


def _is_of_a_page(scope: Message) -> bool:
    """Whether a browser may have sent a call for a web page; an image of a page comes without an origin."""
    host = re.fullmatch(rb"\[?(.*?)\]?(:\d*)?", header(scope, b"host"))
    site = header(scope, b"sec-fetch-site")
    is_elsewhere = host is None or not is_loopback(host[1].decode("latin-1").lower())
    return is_elsewhere or bool(header(scope, b"origin")) or site not in (b"", b"same-origin", b"none")


def made_key(folder: Path) -> str:
    """The key of administration of the servers that share a folder of pushes, made by whoever comes first.

    ConfigError where it is not this user's alone.
    """
    file = folder / KEY_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            _write_once(file)
        status = file.stat()
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise ConfigError(
                f"{file}: others may know this key of the servers; delete it, and start all of them again"
            )
        return file.read_text().strip()
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}; it must be a file of the user who trains and serves") from error


def _write_once(file: Path) -> None:
    """Write another key, whole and readable by this user only; a file that came meanwhile stays."""
    with TemporaryDirectory(dir=file.parent) as folder:
        new = Path(folder) / file.name
        new.touch(mode=0o600)
        new.write_text(secrets.token_hex(16))
        with suppress(FileExistsError):
            file.hardlink_to(new)
