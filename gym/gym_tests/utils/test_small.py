"""Small utilities: JSON servers, pip commands, a cache with a bound, and texts without secrets."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fovea_gym.errors import ConfigError
from fovea_gym.utils.event_loop import wait_for
from fovea_gym.utils.http_json import CallBounds, CallError, JsonServer, bearer
from fovea_gym.utils.installing import pip_install
from fovea_gym.utils.lru_cache import LRUCache
from fovea_gym.utils.shown_text import printable, without_secrets
from gym_tests.chat_server import endpoints
from gym_tests.tables import table

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


def test_a_key_becomes_a_header_without_the_line_break_of_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("schlüssel", "sk-one\nsk-two", "sk\u2026"):
        monkeypatch.setenv("SOME_KEY", key)
        with pytest.raises(ConfigError, match=r"^judge\.api_key_env=SOME_KEY: ") as caught:
            bearer("SOME_KEY", "judge.api_key_env")
        assert key not in str(caught.value)
    monkeypatch.setenv("SOME_KEY", "sk-one\n")
    assert bearer("SOME_KEY", "judge.api_key_env") == {"authorization": "Bearer sk-one"}


CLONED = {"url": "file:///src/fovea", "subdirectory": "gym", "vcs_info": {"vcs": "git", "commit_id": "1a2b"}}


@dataclass
class Installed:
    """A distribution as pip records it."""

    origin: dict[str, object] | None

    def read_text(self, name: str) -> str | None:
        return {"direct_url.json": self.origin and json.dumps(self.origin)}[name]


@table(
    ("origin", "command"),
    [
        *((origin, "pip install 'fovea-rl-gym[hub]'") for origin in (None, {"url": "https://host/fovea.whl"}, CLONED)),
        ({"url": "file:///my%20code/gym", "dir_info": {}}, "pip install '/my code/gym[hub]'"),
        ({"url": "file:///src/fovea/gym", "dir_info": {"editable": True}}, "pip install -e '/src/fovea/gym[hub]'"),
    ],
)
def test_an_extra_comes_from_where_the_package_came_from(
    origin: dict[str, object] | None, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "distribution", lambda _name: Installed(origin))
    assert pip_install("hub") == command


def filled(max_bytes: float, sizes: Sequence[int], min_values: int = 0) -> LRUCache[int, str]:
    """A cache after one value of each size, under the keys 0, 1, ..."""
    cache: LRUCache[int, str] = LRUCache(max_bytes, min_values=min_values)
    for key, size in enumerate(sizes):
        cache.put(key, str(key), size)
    return cache


def test_the_least_recently_used_is_evicted_first() -> None:
    cache = filled(3, [1, 1, 1])
    assert cache.get(0) == "0"
    cache.put(3, "3", 2)
    assert [cache.get(key) for key in range(4)] == ["0", None, None, "3"]


def test_looking_whether_a_key_is_there_does_not_use_it() -> None:
    cache = filled(2, [1, 1])
    assert 0 in cache
    cache.put(2, "2", 1)
    assert [key in cache for key in range(3)] == [False, True, True]


def test_the_newest_values_may_stay_above_the_bound() -> None:
    cache = filled(0, [5, 6], min_values=1)
    assert (cache.get(0), cache.get(1), cache.num_bytes) == (None, "1", 6)


def test_a_value_can_be_discarded() -> None:
    cache = filled(10, [1, 2])
    cache.discard(0)
    cache.discard(0)
    assert (cache.get(0), cache.num_bytes) == (None, 2)


@given(st.integers(0, 20), st.lists(st.tuples(st.integers(0, 5), st.integers(0, 12)), max_size=30))
def test_it_is_the_longest_run_of_recent_values_that_fits(max_bytes: int, puts: list[tuple[int, int]]) -> None:
    """Against the whole history: a value stays as long as all that came since fit beside it."""
    cache: LRUCache[int, int] = LRUCache(max_bytes)
    kept: list[tuple[int, int]] = []
    for key, size in puts:
        cache.put(key, size, size)
        kept = [entry for entry in kept if entry[0] != key] + [(key, size)]
        while sum(size for _, size in kept) > max_bytes:
            kept.pop(0)
    assert [key for key in range(6) if key in cache] == sorted(key for key, _ in kept)
    assert cache.num_bytes == sum(size for _, size in kept)


URL = "https://bob:hunter2@host.org/rows.parquet?version=3&X-Amz-Signature=abc123&token=t0psecret#part"
SHOWN = "https://***@host.org/rows.parquet?version=3&X-Amz-Signature=***&token=***#part"


@table(
    ("text", "shown"),
    [
        (URL, SHOWN),
        (f"cannot read {URL} today", f"cannot read {SHOWN} today"),
        ("https://bob:p@ss@word@host.org/a@b", "https://***@host.org/a@b"),
        *((text, text) for text in ("https://host.org/a@b/c?author=ann&keyword=cat", "s3://bucket/rows@train[:90%]")),
        ("bob@host.org has no secrets: token=1", "bob@host.org has no secrets: token=1"),
    ],
)
def test_passwords_and_keys_of_urls_are_hidden(text: str, shown: str) -> None:
    assert without_secrets(text) == shown


def test_what_steers_a_terminal_is_replaced() -> None:
    assert printable("a\x1b[2J\x9b31mb\r\u202ec\td\ne\x7f") == "a�[2J�31mb��c\td\ne�"
