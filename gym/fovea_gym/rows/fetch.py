"""Downloads of the URLs in rows, within limits of size, time and redirects, and from public addresses only.

Every redirect is a new request and is checked like the first one. Proxies of the environment are ignored, since the
address behind a proxy could not be checked. Bodies are stored as sent, never decompressed.
"""

from __future__ import annotations

import hashlib
import io
import ipaddress
import math
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO
from urllib.parse import urljoin, urlsplit

import httpcore2
import httpx2

from fovea_gym import __version__
from fovea_gym.errors import BadRowError
from fovea_gym.rows.access import UrlLimits
from fovea_gym.utils.files import complete_bytes, delete_abandoned, write_atomically

_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_LOCAL_NAT64 = ipaddress.ip_network("64:ff9b:1::/48")
"""Local-use NAT64 prefix (RFC 8215); Python before 3.13 calls it public, as it does site-local addresses."""
_EMBEDDED = (
    ipaddress.ip_network("::/96"),  # IPv4-compatible addresses (RFC 4291, 2.5.5.1), deprecated
    ipaddress.ip_network("::ffff:0:0:0/96"),  # IPv4-translated addresses (RFC 2765, 2.1), for translators of a network
)
"""Some networks route these to the embedded IPv4 address, although Python calls them public."""
_AZURE_HOST = ipaddress.ip_address("168.63.129.16")
"""The host of every Azure virtual machine, reachable only from there ("What is IP address 168.63.129.16?")."""


class Deadline:
    """A point in time that all operations of a transfer share."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def seconds_left(self) -> float:
        """Seconds until the deadline, above 0; httpcore2.TimeoutException once it has passed."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise httpcore2.TimeoutException("the deadline has passed")
        return left


class PinnedNetwork(httpcore2.NetworkBackend):
    """TCP connections to public addresses (to private ones only if the limits allow it), until a deadline.

    A private address raises BadRowError naming `where`; failures of the network raise httpcore2's exceptions.
    """

    def __init__(self, where: str, deadline: Deadline, limits: UrlLimits) -> None:
        self._where = where
        self._deadline = deadline
        self._limits = limits
        self._sockets = httpcore2.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.NetworkStream:
        address = self._resolved(host, port)
        stream = self._sockets.connect_tcp(address, port, self._deadline.seconds_left(), local_address, socket_options)
        return _TimedStream(stream, self._deadline)

    def _resolved(self, host: str, port: int) -> str:
        """The first address of a host name; every address of the host must be allowed."""
        try:
            found = [str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
        except (OSError, UnicodeError) as error:
            raise httpcore2.ConnectError(str(error)) from error
        private = [address for address in found if not is_public(address)]
        if private and not self._limits.allow_private_addresses:
            raise BadRowError(
                f"{self._where}: {host} is at {private[0]}, an address of this machine or a private network, which "
                "rows may not reach",
                "url_private_address",
                f"set {self._limits.section}allow_private_addresses=true if you trust the rows",
            )
        return found[0]


class _TimedStream(httpcore2.NetworkStream):
    """A stream that gives every operation the time left until the deadline.

    A timeout that restarted with each read would never stop a server that sends a byte now and then.
    """

    def __init__(self, stream: httpcore2.NetworkStream, deadline: Deadline) -> None:
        self._stream = stream
        self._deadline = deadline

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, self._deadline.seconds_left())

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, self._deadline.seconds_left())

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore2.NetworkStream:
        stream = self._stream.start_tls(ssl_context, server_hostname, self._deadline.seconds_left())
        return _TimedStream(stream, self._deadline)

    def close(self) -> None:
        self._stream.close()

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


def is_public(address: str) -> bool:
    """True if an IP address is on the public Internet; an IPv4 address embedded in an IPv6 address is checked too."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip in _LOCAL_NAT64 or ip.is_site_local or any(ip in network for network in _EMBEDDED):
            return False
        if ip in _NAT64:
            return is_public(str(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)))
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if inner is not None:
            return is_public(str(inner))
    return ip.is_global and not ip.is_multicast and ip != _AZURE_HOST


MAX_FAILURES = 3
"""Number of consecutive images that fail before their host is not asked for a while."""
_OF_THE_HOST = ("url_timeout", "url_unreachable", "url_status_429", "url_status_5")
"""Prefixes of the reasons that are failures of the server, not of the image."""


@dataclass(slots=True)
class _FailingHost:
    failures: int = 0
    """Number of consecutive failures."""
    given_up_until: float = 0.0
    """Time of the monotonic clock before which the host is not asked again."""


class FailedHosts:
    """A `read(url, where)` that fails at once for a host that has failed MAX_FAILURES times in a row.

    After `pause_seconds` one more image is requested from the host; if that fails, the host is paused again. `note` is
    called with a message once per host. Thread-safe.
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
        self._hosts: dict[str, _FailingHost] = {}
        self._noted: set[str] = set()
        self._lock = Lock()

    def __call__(self, url: str, where: str) -> bytes:
        """The content of a URL; BadRowError from `read`, or with the reason `url_host_failed` without a request."""
        name = urlsplit(url).netloc.rpartition("@")[2]
        self._check(name, where)
        try:
            content = self._read(url, where)
        except BadRowError as error:
            if error.reason.startswith(_OF_THE_HOST):
                self._failed(name, error.problem)
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
                f"{where}: {name} failed for {host.failures} images in a row and is tried again in "
                f"{left_seconds:.0f} s",
                "url_host_failed",
                "bring it back",
            )

    def _failed(self, name: str, problem: str) -> None:
        with self._lock:
            host = self._hosts.setdefault(name, _FailingHost())
            host.failures += 1
            given_up = self._pause_seconds > 0 and host.failures >= MAX_FAILURES
            if given_up:
                host.given_up_until = self._clock() + self._pause_seconds
            is_new = given_up and name not in self._noted
            if is_new:
                self._noted.add(name)
        if is_new:
            self._note(
                f"{name} failed for {MAX_FAILURES} images in a row, the last one: {problem}; "
                f"its images count as bad rows, and one image is tried every {self._pause_seconds:g} s"
            )


_REDIRECTS = {301, 302, 303, 307, 308}
_TRY_AGAIN = {429, 500, 502, 503, 504}
FIRST_PAUSE_SECONDS = 0.5


class _Retryable(Exception):
    """A failure that may not occur again in another try."""

    def __init__(self, error: BadRowError) -> None:
        super().__init__(str(error))
        self.error = error


def fetch(url: str, where: str, limits: UrlLimits) -> bytes:
    """Return the content at an http(s) URL, of at most `max_image_mib`; BadRowError naming `where`."""
    content = io.BytesIO()
    download(url, where, limits, content, max_bytes=limits.max_image_mib * 2**20)
    return content.getvalue()


def download(url: str, where: str, limits: UrlLimits, into: BinaryIO, *, max_bytes: float = math.inf) -> None:
    """Download an http(s) URL into a file, at most `max_bytes`; raises BadRowError naming `where`."""
    for number in range(limits.retries + 1):
        try:
            _copy(url, where, limits, into, max_bytes)
            return
        except _Retryable as failure:
            if number == limits.retries:
                raise failure.error from None
            time.sleep(FIRST_PAUSE_SECONDS * 2**number)


def _copy(url: str, where: str, limits: UrlLimits, into: BinaryIO, max_bytes: float) -> None:
    def check_size(num_bytes: int) -> None:
        if num_bytes > max_bytes:
            limit = f"{limits.section}max_image_mib={limits.max_image_mib:g}"
            raise _bad(where, f"the server sends more than {limit}", "image_too_large")

    into.seek(0)
    into.truncate()
    with _opened(url, where, limits) as response:
        check_size(int(httpx2.Headers(response.headers).get("Content-Length", "0")))
        for chunk in response.iter_stream():
            into.write(chunk)
            check_size(into.tell())


@contextmanager
def _opened(url: str, where: str, limits: UrlLimits) -> Iterator[httpcore2.Response]:
    """The response with status 200 after all redirects; an incomplete body raises an error."""
    deadline = Deadline(limits.url_timeout_seconds)
    network = PinnedNetwork(where, deadline, limits)
    with _failures_named(where, limits):
        for _ in range(limits.max_redirects + 1):
            target = _parsed(url, where)
            with _requested(target, network) as response:
                if response.status not in _REDIRECTS:
                    _check_status(response, where)
                    yield response
                    return
                url = urljoin(str(target), httpx2.Headers(response.headers).get("Location", ""))
        raise _bad(where, f"more than {limits.max_redirects} redirects", "url_redirects")


@contextmanager
def _failures_named(where: str, limits: UrlLimits) -> Iterator[None]:
    # an OSError is not caught: httpcore2 wraps network errors, so an OSError comes from writing to the disk
    try:
        yield
    except BadRowError:
        raise
    except httpcore2.TimeoutException as error:
        limit = f"{limits.section}url_timeout_seconds={limits.url_timeout_seconds:g}"
        problem = f"the server took more than {limit}"
        raise _Retryable(_bad(where, problem, "url_timeout")) from error
    except (httpcore2.NetworkError, httpcore2.ProtocolError, ValueError) as error:
        problem = f"the server cannot be read ({type(error).__name__}: {str(error)[:120]})"
        raise _Retryable(_bad(where, problem, "url_unreachable")) from error


@contextmanager
def _requested(url: httpx2.URL, network: PinnedNetwork) -> Iterator[httpcore2.Response]:
    """The response to a GET over a separate connection."""
    target = httpcore2.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path)
    headers: dict[bytes | str, bytes | str] = {
        "Host": url.netloc,
        "User-Agent": f"fovea/{__version__}",
        "Accept-Encoding": "identity",
    }
    # http:// needs no certificates, which take milliseconds to load
    trusted = ssl.create_default_context() if url.scheme == "https" else None
    with (
        httpcore2.ConnectionPool(ssl_context=trusted, network_backend=network) as pool,
        pool.stream("GET", target, headers=headers) as response,
    ):
        yield response


def _parsed(url: str, where: str) -> httpx2.URL:
    try:
        parsed = httpx2.URL(url)
    except httpx2.InvalidURL as error:
        raise _bad(where, f"{url[:200]} is not a URL ({error})", "url_invalid") from error
    port_exists = parsed.port is None or 0 < parsed.port < 1 << 16
    if parsed.scheme not in {"http", "https"} or not parsed.host or not port_exists:
        raise _bad(where, f"{url[:200]} is not an http:// or https:// URL", "url_invalid")
    if parsed.userinfo:
        raise _bad(where, "the URL holds a user name, which is not supported", "url_invalid")
    return parsed


def _check_status(response: httpcore2.Response, where: str) -> None:
    if response.status == 200:
        return
    phrase = bytes(response.extensions.get("reason_phrase", b"")).decode("ascii", "replace")
    problem = f"the server answers {response.status} {phrase}"[:120].rstrip()
    error = _bad(where, problem, f"url_status_{response.status}")
    raise _Retryable(error) if response.status in _TRY_AGAIN else error


def _bad(where: str, problem: str, reason: str) -> BadRowError:
    return BadRowError(f"{where}: {problem}", reason, "correct the row, raise the limit")


class FetchedFiles:
    """A cache on disk for `read(url, where)`, of at most `max_gib`; several processes may share its folder.

    An OSError of the disk is raised unchanged and not as BadRowError, since the row itself is fine.
    """

    # nothing is evicted, so that an image that was read once stays the same in every epoch and after a resume

    def __init__(self, folder: Path, max_gib: float, read: Callable[[str, str], bytes]) -> None:
        delete_abandoned(folder)
        self._folder = folder
        self._left_bytes = max_gib * 2**30 - complete_bytes(folder)
        self._read = read

    def __call__(self, url: str, where: str) -> bytes:
        """The content of a URL, read only once if there is room for it in the cache."""
        file = self._folder / hashlib.sha256(url.encode(errors="replace")).hexdigest()
        if file.exists():
            return file.read_bytes()
        content = self._read(url, where)
        if len(content) <= self._left_bytes:
            write_atomically(file, content)
            self._left_bytes -= len(content)
        return content
