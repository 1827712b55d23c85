"""The middleware in front of a server of an engine: its keys, and bans of tokens in each request."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from fovea.rollout.server import ADMIN_KEY_ENV, API_KEY_ENV, BANNED_IDS_ENV
from fovea.rollout.server_guard import (
    KEY_FILE,
    LOWEST_BIAS,
    MAX_BODY_BYTES,
    Guard,
    Message,
    Receive,
    Send,
    made_key,
)
from fovea_gym.errors import ConfigError
from fovea_gym.utils.event_loop import wait_for
from tests.rollout.asgi_calls import everybody, status

ASK, ADMINISTER = "/v1/models", "/update_weights_from_disk"
LOCAL = {"host": "127.0.0.1:8000"}


@pytest.mark.parametrize(
    ("path", "headers", "expected"),
    [
        (ASK, {}, 401),
        (ASK, {"authorization": "Bearer other"}, 401),
        (ASK, {"authorization": "Bearer asks"}, 200),
        (ASK, {"authorization": "Bearer asks", "origin": "http://page.example", "host": "page.example"}, 200),
        (ASK, {"authorization": "Bearer administers"}, 200),
        (ADMINISTER, {}, 401),
        (ADMINISTER, {"authorization": "Bearer asks"}, 403),
        (ADMINISTER, {"authorization": "Bearer administers"}, 200),
        ("/health", {}, 200),
    ],
)
def test_each_path_needs_its_key(
    path: str, headers: dict[str, str], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(API_KEY_ENV, "asks")
    monkeypatch.setenv(ADMIN_KEY_ENV, "administers")
    assert status(Guard, path, **headers) == expected


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        (LOCAL, 200),
        ({"host": "localhost"}, 200),
        ({"host": "[::1]:8000"}, 200),
        (LOCAL | {"sec_fetch_site": "none"}, 200),
        (LOCAL | {"sec_fetch_site": "same-origin"}, 200),
        (LOCAL | {"sec_fetch_site": "cross-site"}, 403),
        (LOCAL | {"sec_fetch_site": "same-site"}, 403),
        (LOCAL | {"origin": "http://page.example"}, 403),
        ({"host": "page.example:8000"}, 403),
        ({"host": "127.0.0.1.page.example"}, 403),
        ({}, 403),
    ],
)
def test_without_a_key_no_web_page_may_ask(
    headers: dict[str, str], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (API_KEY_ENV, ADMIN_KEY_ENV):
        monkeypatch.delenv(name, raising=False)
    assert status(Guard, ASK, **headers) == expected
    assert status(Guard, ADMINISTER, **headers) == 403


def test_a_websocket_is_closed_before_it_is_open() -> None:
    sent: list[Any] = []

    async def send(message: Message) -> None:
        sent.append(message)

    wait_for(Guard(everybody)({"type": "websocket", "path": "/v1/realtime", "headers": []}, None, send))  # type: ignore[arg-type]
    assert sent == [{"type": "websocket.close"}]


def test_the_key_of_administration_is_made_once_and_this_users_only(tmp_path: Path) -> None:
    key = made_key(tmp_path / "weights")
    assert len(key) == 32
    assert made_key(tmp_path / "weights") == key
    file = tmp_path / "weights" / KEY_FILE
    assert [each.name for each in file.parent.iterdir()] == [KEY_FILE]
    assert file.stat().st_mode & 0o777 == 0o600
    os.chmod(file, 0o640)
    with pytest.raises(ConfigError, match="other users may know this key"):
        made_key(tmp_path / "weights")


@pytest.fixture(autouse=True)
def _banned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BANNED_IDS_ENV, "[7]")


def called(*chunks: bytes) -> tuple[int, bytes]:
    """The status that answers a body of these chunks, and the body that the application gets, with 7 banned."""
    got, left, statuses = list[bytes](), list(chunks), list[int]()

    async def application(scope: Message, receive: Receive, send: Send) -> None:
        got.append((await receive())["body"])
        await everybody(scope, receive, send)

    async def receive() -> Message:
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    async def send(message: Message) -> None:
        statuses.append(message.get("status", 0))

    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": [(b"host", b"127.0.0.1")]}
    wait_for(Guard(application)(scope, receive, send))
    return statuses[0], b"".join(got)


def asked(*parts: Any) -> tuple[int, bytes]:
    return called(json.dumps({"messages": [{"role": "user", "content": parts}]}).encode())


def test_bans_are_added_to_what_a_request_has() -> None:
    given = {"seed": 1, "logit_bias": {"3": 2.0, "7": 5.0}}
    status, changed = called(json.dumps(given).encode())
    assert status == 200
    assert json.loads(changed) == {"seed": 1, "logit_bias": {"3": 2.0, "7": LOWEST_BIAS}}


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"\xff", b"[" * 100_000], ids=lambda body: repr(body[:5]))
def test_what_is_no_request_is_refused(body: bytes) -> None:
    assert called(body) == (400, b"")


ADDRESSES = (
    "http://127.0.0.1/x",
    "https://example.org/x.png",
    "file:///etc/hostname",
    "/etc/hostname",
    "x.png",
    " data:,x",
    "http://[::ffff:127.0.0.1]/x",
)


@pytest.mark.parametrize("url", ADDRESSES)
@pytest.mark.parametrize("form", ["object", "text", "anthropic", "image"])
def test_images_by_address_are_refused(url: str, form: str) -> None:
    part = {
        "object": {"type": "image_url", "image_url": {"url": url}},
        "text": {"type": "image_url", "image_url": url},
        "anthropic": {"type": "image", "source": {"type": "url", "url": url}},
        "image": {"type": "image", "image": url},
    }[form]
    assert asked({"type": "text", "text": "x"}, part) == (400, b"")


def test_images_as_data_and_addresses_in_texts_are_let_through() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    assert asked(image, {"type": "text", "text": "see http://127.0.0.1/x"})[0] == 200


def test_a_long_body_costs_no_more_than_its_bytes_and_one_above_the_limit_is_refused() -> None:
    """Bytes added to bytes take 7 s for these."""
    chunk = b"x" * (1 << 12)
    began = time.process_time()
    assert called(*[chunk] * (MAX_BODY_BYTES // len(chunk) - 1), b"") == (400, b"")
    assert time.process_time() - began < 2.0
    assert called(*[chunk] * (MAX_BODY_BYTES // len(chunk)), b"x", b"never read") == (413, b"")
