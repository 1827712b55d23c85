"""Access to a server of an engine: the middleware of its keys before an application that answers everybody."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from fovea.errors import ConfigError
from fovea.rollout.server import ADMIN_KEY_ENV, API_KEY_ENV
from fovea.rollout.server_guard import KEY_FILE, Message, RequireKey, made_key
from fovea.utils.event_loop import wait_for
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
    assert status(RequireKey, path, **headers) == expected


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
    assert status(RequireKey, ASK, **headers) == expected
    assert status(RequireKey, ADMINISTER, **headers) == 403


def test_a_websocket_is_closed_before_it_is_open() -> None:
    sent: list[Any] = []

    async def send(message: Message) -> None:
        sent.append(message)

    wait_for(RequireKey(everybody)({"type": "websocket", "path": "/v1/realtime", "headers": []}, None, send))  # type: ignore[arg-type]
    assert sent == [{"type": "websocket.close"}]


def test_the_key_of_administration_is_made_once_and_this_users_only(tmp_path: Path) -> None:
    key = made_key(tmp_path / "weights")
    assert len(key) == 32
    assert made_key(tmp_path / "weights") == key
    file = tmp_path / "weights" / KEY_FILE
    assert [each.name for each in file.parent.iterdir()] == [KEY_FILE]
    assert file.stat().st_mode & 0o777 == 0o600
    os.chmod(file, 0o640)
    with pytest.raises(ConfigError, match="others may know this key"):
        made_key(tmp_path / "weights")
