"""What URLs of rows send, within limits of size, time and redirects, and never from a private network unasked.

A host name is resolved here, once per request; the address that is checked is the address that is connected to, so
that a name cannot answer differently a moment later. Every redirect is a new request and is checked anew. Proxies of
the environment are not used: behind one, nobody could check the address.
"""

from __future__ import annotations

import errno
import hashlib
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar
from urllib.parse import SplitResult, quote, urljoin, urlsplit

from fovea import __version__
from fovea.data.readers.copies import made_once
from fovea.errors import BadRowError

_REDIRECTS = {301, 302, 303, 307, 308}
_FULL_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_TRY_AGAIN = {429, 500, 502, 503, 504}
_CHUNK_BYTES = 1 << 16
_FIRST_PAUSE_SECONDS = 0.5
_URL_CHARACTERS = "%/:?#[]@!$&'()*+,;=~-._"
_NAT64 = ipaddress.ip_network("64:ff9b::/96")

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True, kw_only=True)
class UrlLimits:
    """See the settings of the same names in `config.Data`."""

    max_mib: float = 32.0
    timeout_seconds: float = 20.0
    max_redirects: int = 5
    retries: int = 2
    allow_private_addresses: bool = False


class _Retryable(Exception):
    """Wraps what may be gone at the next try."""

    def __init__(self, error: BadRowError) -> None:
        super().__init__(str(error))
        self.error = error


def fetch(url: str, where: str, limits: UrlLimits) -> bytes:
    """The content at an http(s) URL; BadRowError naming `where`."""
    return _with_retries(limits, lambda: _content(url, where, limits))


def download(url: str, where: str, limits: UrlLimits, into: BinaryIO) -> None:
    """The same into a file, for content that need not fit in memory; `max_mib` is not looked at."""
    _with_retries(limits, lambda: _copied(url, where, limits, into))


def _with_retries(limits: UrlLimits, attempt: Callable[[], Made]) -> Made:
    for number in range(limits.retries):
        try:
            return attempt()
        except _Retryable:
            time.sleep(_FIRST_PAUSE_SECONDS * 2**number)
    try:
        return attempt()
    except _Retryable as failure:
        raise failure.error from None


def _content(url: str, where: str, limits: UrlLimits) -> bytes:
    max_bytes = int(limits.max_mib * 2**20)
    content = bytearray()
    with _opened(url, where, limits) as response:
        announced = _announced(response)
        while (announced or 0) <= max_bytes and (chunk := response.read(_CHUNK_BYTES)):
            content += chunk
            if len(content) > max_bytes:
                break
    if max(len(content), announced or 0) > max_bytes:
        raise _bad(where, f"the server sends more than data.max_image_mib={limits.max_mib:g}", "image_too_large")
    _check_complete(len(content), announced, where)
    return bytes(content)


def _copied(url: str, where: str, limits: UrlLimits, into: BinaryIO) -> None:
    into.seek(0)
    into.truncate()
    with _opened(url, where, limits) as response:
        while chunk := response.read(_CHUNK_BYTES):
            into.write(chunk)
        _check_complete(into.tell(), _announced(response), where)


@contextmanager
def _opened(url: str, where: str, limits: UrlLimits) -> Iterator[http.client.HTTPResponse]:
    """The response at the end of the redirects, status 200; cut off at the deadline, whatever the server does."""
    deadline = time.monotonic() + limits.timeout_seconds
    with _failures_named(where, limits, deadline):
        for _ in range(limits.max_redirects + 1):
            parts = _checked_url(url, where)
            with _connected(parts, where, limits, deadline) as connection, closing(_get(connection, parts)) as response:
                if response.status not in _REDIRECTS:
                    _check_status(response, where)
                    yield response
                    if time.monotonic() >= deadline:
                        raise TimeoutError  # what was read may end where it was cut off
                    return
                url = urljoin(url, response.headers.get("Location", ""))
        raise _bad(where, f"more than data.max_url_redirects={limits.max_redirects} redirects", "url_redirects")


@contextmanager
def _failures_named(where: str, limits: UrlLimits, deadline: float) -> Iterator[None]:
    try:
        yield
    except BadRowError:
        raise
    except (OSError, http.client.HTTPException, ValueError) as error:
        if isinstance(error, OSError) and error.errno in _FULL_DISK:
            raise  # ours, not the server's: no other try would help
        if isinstance(error, TimeoutError) or time.monotonic() >= deadline:
            problem = f"the server took more than data.url_timeout_seconds={limits.timeout_seconds:g}"
            raise _Retryable(_bad(where, problem, "url_timeout")) from error
        problem = f"the server cannot be read ({type(error).__name__}: {str(error)[:120]})"
        raise _Retryable(_bad(where, problem, "url_unreachable")) from error


@contextmanager
def _connected(
    parts: SplitResult, where: str, limits: UrlLimits, deadline: float
) -> Iterator[http.client.HTTPConnection]:
    """A connection to the checked address of the URL's host, shut at the deadline and at the end."""
    host, secure = parts.hostname or "", parts.scheme == "https"
    address = _resolved(host, parts.port or (443 if secure else 80), where, limits)
    seconds = max(deadline - time.monotonic(), 0.001)
    with socket.create_connection(address, timeout=seconds) as plain, _shut_at(deadline, plain):
        connection = http.client.HTTPConnection(host, address[1], timeout=seconds)
        with closing(connection):
            connection.sock = plain
            if secure:
                connection.sock = ssl.create_default_context().wrap_socket(plain, server_hostname=host)
            yield connection


@contextmanager
def _shut_at(deadline: float, connected: socket.socket) -> Iterator[None]:
    """A server that sends a byte now and then never runs into a socket's own time-out."""
    with connected.dup() as same:  # TLS takes the first one over
        timer = threading.Timer(max(deadline - time.monotonic(), 0), _shut, [same])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


def _shut(connected: socket.socket) -> None:
    with suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)


def _get(connection: http.client.HTTPConnection, parts: SplitResult) -> http.client.HTTPResponse:
    target = quote((parts.path or "/") + (f"?{parts.query}" if parts.query else ""), safe=_URL_CHARACTERS)
    headers = {"Host": parts.netloc, "User-Agent": f"fovea/{__version__}", "Accept-Encoding": "identity"}
    connection.request("GET", target, headers=headers)
    return connection.getresponse()


def _checked_url(url: str, where: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        port_is_number = parts.port is None or parts.port > 0
    except ValueError as error:
        raise _bad(where, f"{url[:200]} is no URL ({error})", "url_invalid") from error
    if parts.scheme not in {"http", "https"} or not parts.hostname or not port_is_number:
        raise _bad(where, f"{url[:200]} is no http:// or https:// URL", "url_invalid")
    if parts.username is not None:
        raise _bad(where, "the URL holds a user name, and none is sent", "url_invalid")
    return parts


def _resolved(host: str, port: int, where: str, limits: UrlLimits) -> tuple[str, int]:
    """The address to connect to; every one that the name has must be public."""
    found = [str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    private = [address for address in found if not is_public(address)]
    if private and not limits.allow_private_addresses:
        raise BadRowError(
            f"{where}: {host} is at {private[0]}, an address of this machine or a private network, which rows may not "
            "reach; set data.allow_private_addresses=true if you trust the rows, or data.on_bad_row=skip",
            "url_private_address",
        )
    return found[0], port


def is_public(address: str) -> bool:
    """Whether an IP address is one of the open Internet, whatever it is wrapped in."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip in _NAT64:
            return is_public(str(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)))
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if inner is not None:
            return is_public(str(inner))
    return ip.is_global and not ip.is_multicast


def _check_status(response: http.client.HTTPResponse, where: str) -> None:
    if response.status == 200:
        return
    problem = f"the server answers {response.status} {response.reason}"[:120]
    error = _bad(where, problem, f"url_status_{response.status}")
    raise _Retryable(error) if response.status in _TRY_AGAIN else error


def _announced(response: http.client.HTTPResponse) -> int | None:
    """Bytes that the server says it will send, if it does."""
    length = response.headers.get("Content-Length", "")
    return int(length) if length.isdecimal() else None


def _check_complete(num_bytes: int, announced: int | None, where: str) -> None:
    if announced is not None and num_bytes != announced:
        problem = f"the server sent {num_bytes} of {announced} bytes"
        raise _Retryable(_bad(where, problem, "url_unreachable"))


def _bad(where: str, problem: str, reason: str) -> BadRowError:
    return BadRowError(f"{where}: {problem}; correct the row, raise the limit, or set data.on_bad_row=skip", reason)


class FetchedFiles:
    """`read` with a memory on disk: an image that has come once is the same in every epoch and after a resume.

    A disk that refuses is an OSError and no bad row: the row is as good as before.
    """

    def __init__(self, folder: Path, max_gib: float, read: Callable[[str, str], bytes]) -> None:
        self._folder = folder
        self._left_bytes = max_gib * 2**30 - sum(file.stat().st_size for file in folder.glob("*"))
        self._read = read

    def __call__(self, url: str, where: str) -> bytes:
        file = self._folder / hashlib.sha256(url.encode(errors="replace")).hexdigest()
        if file.exists():
            return file.read_bytes()
        content = self._read(url, where)
        if len(content) <= self._left_bytes:
            made_once(self._folder, file.name, lambda into: into.write_bytes(content))
            self._left_bytes -= len(content)
        return content
