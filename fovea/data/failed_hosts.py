"""Memory of servers that do not answer, so that a dead one costs its timeouts a few times and not once per row."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from urllib.parse import urlsplit

from fovea.errors import BadRowError

MAX_FAILURES = 3
"""Images of one host that may fail in a row before it is given up for a while."""
_OF_THE_HOST = ("url_timeout", "url_unreachable", "url_status_429", "url_status_5")
"""Beginnings of the reasons that are the server's and not the image's."""


@dataclass(slots=True)
class _Host:
    failures: int = 0
    """In a row."""
    given_up_until: float = 0.0
    """On the clock."""


class FailedHosts:
    """A `read(url, where)` that answers at once for a host that failed MAX_FAILURES times in a row.

    After `pause_seconds` one more image is asked of the host: it comes, or the host is given up again. `note` is told
    of each host once. May be called from several threads.
    """

    def __init__(
        self,
        read: Callable[[str, str], bytes],
        pause_seconds: float,
        note: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read = read
        self._pause_seconds = pause_seconds
        self._note = note
        self._clock = clock
        self._hosts: dict[str, _Host] = {}
        self._noted: set[str] = set()
        self._lock = Lock()

    def __call__(self, url: str, where: str) -> bytes:
        """The content of a URL; BadRowError of `read`, or at once with the reason `url_host_failed`."""
        name = urlsplit(url).netloc.rpartition("@")[2]
        self._check(name, where)
        try:
            content = self._read(url, where)
        except BadRowError as error:
            if error.reason.startswith(_OF_THE_HOST):
                self._failed(name, str(error))
            raise
        with self._lock:
            self._hosts.pop(name, None)
        return content

    def _check(self, name: str, where: str) -> None:
        with self._lock:
            host = self._hosts.get(name)
            left_seconds = host.given_up_until - self._clock() if host else 0.0
        if host is not None and left_seconds > 0:
            raise BadRowError(
                f"{where}: {name} failed for {host.failures} images in a row and is asked again in "
                f"{left_seconds:.0f} s (data.url_host_pause_seconds); bring it back, or set data.on_bad_row=skip",
                "url_host_failed",
            )

    def _failed(self, name: str, error: str) -> None:
        with self._lock:
            host = self._hosts.setdefault(name, _Host())
            host.failures += 1
            given_up = self._pause_seconds > 0 and host.failures >= MAX_FAILURES
            if given_up:
                host.given_up_until = self._clock() + self._pause_seconds
            is_new = given_up and name not in self._noted
            if is_new:
                self._noted.add(name)
        if is_new:
            self._note(
                f"{name} failed for {MAX_FAILURES} images in a row, the last one: {error.partition('; ')[0]}; "
                f"its images count as bad rows, and it is asked for one every {self._pause_seconds:g} s"
            )
