"""Bans in front of a server of an engine: what reaches the application behind the middleware."""

from __future__ import annotations

import json

import pytest

from fovea.rollout.asgi import Message, Receive, Send
from fovea.rollout.server import BANNED_IDS_ENV
from fovea.rollout.server_bans import LOWEST_BIAS, Bans
from fovea.utils.event_loop import wait_for


def handed_on(body: bytes, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """The body that the application gets for this one, with 7 banned."""
    monkeypatch.setenv(BANNED_IDS_ENV, "[7]")
    got: list[bytes] = []

    async def application(_scope: Message, receive: Receive, _send: Send) -> None:
        got.append((await receive())["body"])

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(_message: Message) -> None: ...

    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": []}
    wait_for(Bans(application)(scope, receive, send))
    return got[0]


def test_bans_are_added_to_what_a_request_has(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"seed": 1, "logit_bias": {"3": 2.0, "7": 5.0}}
    changed = json.loads(handed_on(json.dumps(given).encode(), monkeypatch))
    assert changed == {"seed": 1, "logit_bias": {"3": 2.0, "7": LOWEST_BIAS}}


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"\xff", b"[" * 100_000], ids=lambda body: repr(body[:5]))
def test_what_is_no_request_is_left_to_the_engine_which_says_what_is_wrong(
    body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert handed_on(body, monkeypatch) == body
