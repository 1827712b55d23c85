"""The middleware in front of a server of an engine: its keys, bans of tokens, and images by address."""

from __future__ import annotations

import base64
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from fovea.rollout.server import ADMIN_KEY_ENV, API_KEY_ENV, BANNED_IDS_ENV, URL_LIMITS_ENV, ModelServer, environment
from fovea.rollout.server_guard import (
    KEY_FILE,
    LOWEST_BIAS,
    MAX_ADDRESSES,
    MAX_BODY_BYTES,
    UNREADABLE,
    Guard,
    Message,
    Receive,
    Send,
    made_key,
)
from fovea_gym.errors import ConfigError
from fovea_gym.rows import fetch
from fovea_gym.rows.access import UrlLimits
from fovea_gym.utils.event_loop import wait_for
from gym_tests.images import encoded, noise
from gym_tests.rows.web import Site, served
from gym_tests.tables import table
from tests.rollout.asgi_calls import answer_of, everybody

ASK, ADMINISTER = "/v1/models", "/update_weights_from_disk"
LOCAL = {"host": "127.0.0.1:8000"}
REFUSED = (400, b'{"error": "%s"}' % UNREADABLE, None)


@pytest.fixture(autouse=True)
def _banned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BANNED_IDS_ENV, "[7]")


def status(path: str, **headers: str) -> int:
    return wait_for(answer_of(Guard(everybody), path, **headers))[0]


@table(
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
    assert status(path, **headers) == expected


@table(
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
    assert (status(ASK, **headers), status(ADMINISTER, **headers)) == (expected, 403)


def test_a_websocket_is_closed_before_it_is_open() -> None:
    sent: list[Any] = []

    async def send(message: Message) -> None:
        sent.append(message)

    wait_for(Guard(everybody)({"type": "websocket", "path": "/v1/realtime", "headers": []}, None, send))  # type: ignore[arg-type]
    assert sent == [{"type": "websocket.close"}]


def test_the_key_of_administration_is_made_once_and_this_users_only(tmp_path: Path) -> None:
    key, file = made_key(tmp_path / "weights"), tmp_path / "weights" / KEY_FILE
    assert len(key) == 32
    assert made_key(tmp_path / "weights") == key
    assert [each.name for each in file.parent.iterdir()] == [KEY_FILE]
    assert file.stat().st_mode & 0o777 == 0o600
    os.chmod(file, 0o640)
    with pytest.raises(ConfigError, match="other users may know this key"):
        made_key(tmp_path / "weights")


def called(*chunks: bytes) -> tuple[int, bytes, bytes]:
    """Status and body of the answer to a body of these chunks, and the body that the application gets."""
    got = list[bytes]()

    async def application(scope: Message, receive: Receive, send: Send) -> None:
        got.append((await receive())["body"])
        await everybody(scope, receive, send)

    answer = wait_for(answer_of(Guard(application), "/v1/chat/completions", *chunks, host="127.0.0.1"))
    return *answer, b"".join(got)


def asked(*parts: Any) -> tuple[int, bytes, Any]:
    """Status and body of the answer to a message of these parts, and the parts that the application gets."""
    *answer, got = called(json.dumps({"messages": [{"role": "user", "content": parts}]}).encode())
    return *answer, json.loads(got)["messages"][0]["content"] if got else None


def test_bans_are_added_to_what_a_request_has() -> None:
    status, _, changed = called(json.dumps({"seed": 1, "logit_bias": {"3": 2.0, "7": 5.0}}).encode())
    assert (status, json.loads(changed)) == (200, {"seed": 1, "logit_bias": {"3": 2.0, "7": LOWEST_BIAS}})


@table("body", [b"", b"{", b"[1]", b"\xff", b"[" * 100_000])
def test_what_is_no_request_is_refused(body: bytes) -> None:
    status, _, got = called(body)
    assert (status, got) == (400, b"")


ADDRESSES = (
    *("http://127.0.0.1/x", "https://example.org/x.png", "file:///etc/hostname", "/etc/hostname"),
    *("x.png", " data:,x", "http://[::ffff:127.0.0.1]/x"),
)


@table("url", ADDRESSES)
def test_images_by_address_are_refused(url: str) -> None:
    for part in (
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image_url", "image_url": url},
        {"type": "image", "source": {"type": "url", "url": url}},
        {"type": "image", "image": url},
    ):
        status, _, got = asked({"type": "text", "text": "x"}, part)
        assert (status, got) == (400, None), part


def test_images_as_data_and_addresses_in_texts_are_let_through() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    assert asked(image, {"type": "text", "text": "see http://127.0.0.1/x"})[0] == 200


def test_a_long_body_costs_no_more_than_its_bytes_and_one_above_the_limit_is_refused() -> None:
    """Bytes added to bytes take 7 s for these."""
    chunk = b"x" * (1 << 12)
    began = time.process_time()
    assert called(*[chunk] * (MAX_BODY_BYTES // len(chunk) - 1), b"")[::2] == (400, b"")
    assert time.process_time() - began < 2.0
    assert called(*[chunk] * (MAX_BODY_BYTES // len(chunk)), b"x", b"never read")[::2] == (413, b"")


PAGES = {
    "/a.png": encoded(noise(0)),
    "/b.png": encoded(noise(1)),
    "/text.png": b"no image",
    "/large.png": bytes(2 << 20),
}


@pytest.fixture
def site() -> Iterator[Site]:
    """A real HTTP server."""
    with served(PAGES) as started:
        yield started


def reading(*parts: Any, **limits: Any) -> tuple[int, bytes, Any]:
    """As `asked`, of a server that reads images by address."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(URL_LIMITS_ENV, json.dumps(asdict(UrlLimits(retries=0, **{"max_image_mib": 1.0, **limits}))))
        return asked(*parts)


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, "detail": "high"}}


def test_the_engine_gets_the_content_and_no_address(site: Site) -> None:
    """By both forms of OpenAI's interface, after a redirect too, and beside data; all else stays as it was."""
    data = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    text = {"type": "text", "text": f"see {site.url}/a.png"}
    parts = [image(f"{site.url}/a.png"), data, text, {"type": "image_url", "image_url": f"{site.url}/to//b.png"}]
    status, _, (first, *same, last) = reading(*parts, allow_private_addresses=True)
    assert (status, same, first["image_url"]["detail"]) == (200, [data, text], "high")
    for url, page in ((first["image_url"]["url"], "/a.png"), (last["image_url"], "/b.png")):
        begin, _, content = url.partition(",")
        assert (begin, base64.b64decode(content)) == ("data:image/*;base64", PAGES[page])


@table("host", ["127.0.0.1", "[::ffff:127.0.0.1]", "localhost"])
def test_private_addresses_are_not_asked(host: str, site: Site) -> None:
    assert reading(image(f"http://{host}:{site.url.rpartition(':')[2]}/a.png")) == REFUSED
    assert not site.asked


def test_a_redirect_to_this_machine_is_refused(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The address of the first request counts as public, where it leads to does not."""
    redirect = image(f"{site.url}/to/{site.url}/a.png")
    public = iter([True, True, True, False])
    monkeypatch.setattr(fetch, "is_public", lambda _address: next(public))
    assert reading(redirect)[0] == 200
    site.asked.clear()
    assert reading(redirect) == REFUSED
    assert site.asked == [f"/to/{site.url}/a.png"]


def test_no_answer_tells_what_exists(site: Site, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(encoded(noise(2)))
    addresses = [
        *(f"{site.url}/{name}" for name in ("absent.png", "text.png", "large.png", "status/500", "loop")),
        *(f"{before}{tmp_path}/{name}" for before in ("file://", "") for name in ("a.png", "absent.png")),
        *("http://127.0.0.1:9/a.png", "ftp://127.0.0.1/a.png", "http://user@127.0.0.1/a.png", "s3://bucket/a.png"),
    ]
    for url in addresses:
        assert reading(image(url), allow_private_addresses=True, url_timeout_seconds=2.0) == REFUSED, url


def test_a_picture_of_too_many_pixels_never_reaches_the_engine() -> None:
    with served({"/wide.png": encoded(Image.new("1", (9000, 9000)))}) as site:
        assert reading(image(f"{site.url}/wide.png"), allow_private_addresses=True) == REFUSED


def test_videos_and_other_forms_and_many_addresses_are_refused_with_the_reason(site: Site) -> None:
    url, form = f"{site.url}/a.png", b"send images as image_url"
    for parts, reason in (
        ([{"type": "video_url", "video_url": {"url": url}}], form),
        ([{"type": "image", "image": url}], form),
        ([image(url)] * (MAX_ADDRESSES + 1), b'{"error": "the request has more than 16 images by address"}'),
    ):
        status, said, _ = reading(*parts, allow_private_addresses=True)
        assert (status, reason in said, site.asked) == (400, True, []), said


def test_an_inherited_variable_opens_no_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(URL_LIMITS_ENV, "{}")
    assert URL_LIMITS_ENV not in environment(ModelServer(folder=Path(), name="x", host="127.0.0.1", port=1))
