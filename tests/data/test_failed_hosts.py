"""A host that does not answer is given up for a while; real sockets on this machine."""

from __future__ import annotations

import socket
import time
from functools import partial

import pytest

from fovea.data.fetch import MAX_FAILURES, FailedHosts, UrlLimits, fetch
from fovea.errors import BadRowError
from tests.data.web import served

LIMITS = UrlLimits(timeout_seconds=0.3, retries=0, allow_private_addresses=True)
PAUSE_SECONDS = 60.0


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def hosts(noted: list[str], clock: Clock, pause_seconds: float = PAUSE_SECONDS) -> FailedHosts:
    return FailedHosts(partial(fetch, limits=LIMITS), pause_seconds, noted.append, clock)


def reason_of(read: FailedHosts, url: str) -> str:
    with pytest.raises(BadRowError) as failed:
        read(url, "row 3")
    assert str(failed.value).startswith("row 3: ")
    return failed.value.reason


def test_a_silent_host_costs_three_timeouts_and_one_message() -> None:
    noted: list[str] = []
    clock = Clock()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host = f"127.0.0.1:{silent.getsockname()[1]}"
        read = hosts(noted, clock)
        assert [reason_of(read, f"http://{host}/{n}.png") for n in range(MAX_FAILURES)] == ["url_timeout"] * 3
        started = time.monotonic()
        assert {reason_of(read, f"http://{host}/{n}.png") for n in range(200)} == {"url_host_failed"}
        assert time.monotonic() - started < 200 * LIMITS.timeout_seconds / 4, "none of them waits for its timeout"
        assert len(noted) == 1
        assert noted[0].startswith(f"{host} failed for 3 images in a row, the last one: row 3: the server took more")
        clock.seconds += PAUSE_SECONDS
        assert reason_of(read, f"http://{host}/again.png") == "url_timeout", "one more try"
        assert reason_of(read, f"http://{host}/again.png") == "url_host_failed"
        assert len(noted) == 1
        with served({"/a.png": b"picture"}) as other:
            assert read(f"{other.url}/a.png", "row 4") == b"picture", "another host is asked as ever"


def test_a_host_that_comes_back_is_asked_again() -> None:
    clock = Clock()
    with served({"/a.png": b"picture"}) as site:
        read = hosts([], clock)
        for _ in range(MAX_FAILURES):
            assert reason_of(read, f"{site.url}/status/503") == "url_status_503"
        assert reason_of(read, f"{site.url}/a.png") == "url_host_failed"
        clock.seconds += PAUSE_SECONDS
        assert read(f"{site.url}/a.png", "row 4") == b"picture"
        for _ in range(MAX_FAILURES - 1):
            assert reason_of(read, f"{site.url}/status/503") == "url_status_503", "counted from the start again"
        assert read(f"{site.url}/a.png", "row 4") == b"picture"


def test_what_is_wrong_with_one_image_is_not_the_hosts_fault() -> None:
    with served({"/a.png": b"picture"}) as site:
        read = hosts([], Clock())
        assert {reason_of(read, f"{site.url}/none-{n}") for n in range(9)} == {"url_status_404"}
        assert read(f"{site.url}/a.png", "row 4") == b"picture"


def test_without_a_pause_every_image_is_asked_for() -> None:
    with served({}) as site:
        read = hosts([], Clock(), pause_seconds=0)
        assert {reason_of(read, f"{site.url}/status/503") for _ in range(5)} == {"url_status_503"}
        assert len(site.asked) == 5
