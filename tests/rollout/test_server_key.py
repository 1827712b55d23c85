"""Who may call a server of an engine: the middleware of its key before an application that answers everybody."""

from __future__ import annotations

import pytest

from fovea.rollout.server import API_KEY_ENV
from fovea.rollout.server_key import RequireKey
from tests.rollout.asgi_calls import status


@pytest.mark.parametrize(
    ("path", "headers", "expected"),
    [
        ("/collective_rpc", {}, 401),
        ("/collective_rpc", {"authorization": "Bearer other"}, 401),
        ("/collective_rpc", {"authorization": "Bearer secret"}, 200),
        ("/v1/models", {"authorization": "Bearer secret", "origin": "http://page.example"}, 200),
        ("/health", {}, 200),
    ],
)
def test_with_a_key_it_is_asked_for_on_every_path(
    path: str, headers: dict[str, str], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(API_KEY_ENV, "secret")
    assert status(RequireKey, path, **headers) == expected


@pytest.mark.parametrize(("headers", "expected"), [({}, 200), ({"origin": "http://page.example"}, 403)])
def test_without_a_key_no_web_page_may_call(
    headers: dict[str, str], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(API_KEY_ENV, raising=False)
    assert status(RequireKey, "/collective_rpc", **headers) == expected
