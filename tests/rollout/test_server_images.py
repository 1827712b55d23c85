"""Images by address in requests to a server that reads them: a real HTTP server, its content as data, and refusals."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from fovea.rollout.server import BANNED_IDS_ENV, URL_LIMITS_ENV, ModelServer, environment
from fovea.rollout.server_guard import MAX_ADDRESSES, UNREADABLE, Guard, Message
from fovea_gym.rows import fetch
from fovea_gym.rows.access import UrlLimits
from fovea_gym.utils.event_loop import wait_for
from gym_tests.images import encoded, noise
from gym_tests.rows.web import Site, served
from tests.rollout.asgi_calls import everybody

PAGES = {
    "/a.png": encoded(noise(0)),
    "/b.png": encoded(noise(1)),
    "/text.png": b"no image",
    "/large.png": bytes(2 << 20),
}


@pytest.fixture
def site() -> Iterator[Site]:
    with served(PAGES) as started:
        yield started


def asked(*parts: Any, **limits: Any) -> tuple[int, bytes, Any]:
    """Status and answer of a request with these parts, and the parts that the engine gets."""
    sent, got = list[Any](), list[bytes]()
    body = json.dumps({"messages": [{"role": "user", "content": parts}]}).encode()

    async def engine(scope: Message, receive: Any, send: Any) -> None:
        got.append((await receive())["body"])
        await everybody(scope, receive, send)

    async def receive() -> Message:
        return {"type": "http.request", "body": body}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": [(b"host", b"127.0.0.1")]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(BANNED_IDS_ENV, "[]")
        patch.setenv(URL_LIMITS_ENV, json.dumps(asdict(UrlLimits(retries=0, **{"max_image_mib": 1.0, **limits}))))
        wait_for(Guard(engine)(scope, receive, send))
    content = json.loads(got[0])["messages"][0]["content"] if got else None
    return sent[0]["status"], sent[-1].get("body", b""), content


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, "detail": "high"}}


def test_the_engine_gets_the_content_and_no_address(site: Site) -> None:
    """By both forms of OpenAI's interface, after a redirect too, and beside data; all else stays as it was."""
    data = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    text = {"type": "text", "text": f"see {site.url}/a.png"}
    parts = [image(f"{site.url}/a.png"), data, text, {"type": "image_url", "image_url": f"{site.url}/to//b.png"}]
    status, _, (first, *same, last) = asked(*parts, allow_private_addresses=True)
    assert (status, same, first["image_url"]["detail"]) == (200, [data, text], "high")
    for url, page in ((first["image_url"]["url"], "/a.png"), (last["image_url"], "/b.png")):
        begin, _, content = url.partition(",")
        assert (begin, base64.b64decode(content)) == ("data:image/*;base64", PAGES[page])


PRIVATE = ("http://127.0.0.1:{port}/a.png", "http://[::ffff:127.0.0.1]:{port}/a.png", "http://localhost:{port}/a.png")


@pytest.mark.parametrize("url", PRIVATE)
def test_private_addresses_are_not_asked(url: str, site: Site) -> None:
    port = site.url.rpartition(":")[2]
    assert asked(image(url.format(port=port)))[:2] == refused()
    assert not site.asked


def test_a_redirect_to_this_machine_is_refused(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The address of the first request counts as public, where it leads to does not."""
    redirect = image(f"{site.url}/to/{site.url}/a.png")
    public = iter([True, True, True, False])
    monkeypatch.setattr(fetch, "is_public", lambda _address: next(public))
    assert asked(redirect)[0] == 200
    site.asked.clear()
    assert asked(redirect)[:2] == refused()
    assert site.asked == [f"/to/{site.url}/a.png"]


def refused() -> tuple[int, bytes]:
    return 400, b'{"error": "%s"}' % UNREADABLE


def test_no_answer_tells_what_exists(site: Site, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(encoded(noise(2)))
    addresses = [
        *(f"{site.url}/{name}" for name in ("absent.png", "text.png", "large.png", "status/500", "loop")),
        *(f"file://{tmp_path}/{name}" for name in ("a.png", "absent.png")),
        *(f"{tmp_path}/{name}" for name in ("a.png", "absent.png")),
        *("http://127.0.0.1:9/a.png", "ftp://127.0.0.1/a.png", "http://user@127.0.0.1/a.png", "s3://bucket/a.png"),
    ]
    for url in addresses:
        assert asked(image(url), allow_private_addresses=True, url_timeout_seconds=2.0)[:2] == refused(), url


def test_a_picture_of_too_many_pixels_never_reaches_the_engine() -> None:
    with served({"/wide.png": encoded(Image.new("1", (9000, 9000)))}) as site:
        assert asked(image(f"{site.url}/wide.png"), allow_private_addresses=True)[:2] == refused()


@pytest.mark.parametrize("part", [{"type": "video_url", "video_url": {"url": "{}"}}, {"type": "image", "image": "{}"}])
def test_other_addresses_are_refused(part: dict[str, Any], site: Site) -> None:
    given = json.loads(json.dumps(part).replace("{}", f"{site.url}/a.png"))
    status, reason, _ = asked(given, allow_private_addresses=True)
    assert (status, b"send images as image_url" in reason, site.asked) == (400, True, [])


def test_the_number_of_addresses_is_bounded(site: Site) -> None:
    many = [image(f"{site.url}/a.png")] * (MAX_ADDRESSES + 1)
    status, reason, _ = asked(*many, allow_private_addresses=True)
    assert (status, reason, site.asked) == (400, b'{"error": "the request has more than 16 images by address"}', [])


def test_an_inherited_variable_opens_no_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(URL_LIMITS_ENV, "{}")
    server = ModelServer(folder=Path(), name="x", host="127.0.0.1", port=1)
    assert URL_LIMITS_ENV not in environment(server)
