"""Calls of a JSON server: the proxies of the environment are for other machines."""

from __future__ import annotations

import pytest

from fovea_gym.errors import ConfigError
from fovea_gym.utils.event_loop import wait_for
from fovea_gym.utils.http_json import CallBounds, CallError, JsonServer, bearer
from gym_tests.chat_server import endpoints

BOUNDS = CallBounds(timeout_seconds=10.0, calls_at_once=2)


def asked(url: str) -> object:
    """The answer to an empty question."""

    async def ask() -> object:
        server = JsonServer(url, BOUNDS)
        try:
            return await server.post("/ask", {})
        finally:
            await server.close()

    return wait_for(ask())


def test_a_proxy_gets_calls_of_other_machines_and_none_of_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with endpoints() as start:
        here, proxy = start((200, b'"here"')), start((200, b'"proxy"'))
        for name in ("HTTP_PROXY", "http_proxy"):
            monkeypatch.setenv(name, proxy.url.removesuffix("/v1"))
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        assert asked(here.url) == "here"
        assert asked(here.url.replace("127.0.0.1", "localhost")) == "here"
        assert asked("http://elsewhere.invalid") == "proxy"
    with pytest.raises(CallError):
        asked(here.url)


@pytest.mark.parametrize("key", ["schlüssel", "sk-one\nsk-two", "sk\u2026"])
def test_a_key_that_no_header_may_hold_is_named_by_its_setting(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", key)
    with pytest.raises(ConfigError, match=r"^judge\.api_key_env=SOME_KEY: ") as caught:
        bearer("SOME_KEY", "judge.api_key_env")
    assert key not in str(caught.value)


def test_a_key_becomes_a_header_without_the_line_break_of_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "sk-one\n")
    assert bearer("SOME_KEY", "judge.api_key_env") == {"authorization": "Bearer sk-one"}
