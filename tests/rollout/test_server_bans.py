"""Bans in front of a server of an engine: what reaches the application behind the middleware."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from fovea.rollout.server import BANNED_IDS_ENV
from fovea.rollout.server_guard import LOWEST_BIAS, MAX_BODY_BYTES, Bans, Message, Receive, Send
from fovea.utils.event_loop import wait_for
from tests.rollout.asgi_calls import everybody


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

    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": []}
    wait_for(Bans(application)(scope, receive, send))
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
