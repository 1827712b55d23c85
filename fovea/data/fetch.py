"""Downloads of the URLs in rows, within limits of size, time and redirects, and from public addresses only.

Every redirect is a new request and is checked anew. Proxies of the environment are not used: behind one, nobody could
check the address. Bodies are taken as they are sent, never decompressed.
"""

from __future__ import annotations

import hashlib
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar
from urllib.parse import urljoin

import httpcore2
import httpx2

from fovea import __version__
from fovea.data.pinned_network import Deadline, PinnedNetwork
from fovea.errors import BadRowError
from fovea.utils.files import complete_bytes, delete_abandoned, write_atomically

_REDIRECTS = {301, 302, 303, 307, 308}
_TRY_AGAIN = {429, 500, 502, 503, 504}
FIRST_PAUSE_SECONDS = 0.5

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class UrlLimits:
    """Limits of one download, from the settings of the same names in `config.Data`."""

    max_mib: float = 32.0
    timeout_seconds: float = 20.0
    max_redirects: int = 5
    retries: int = 2
    allow_private_addresses: bool = False


class _Retryable(Exception):
    """A failure that another try may not meet."""

    def __init__(self, error: BadRowError) -> None:
        super().__init__(str(error))
        self.error = error


def fetch(url: str, where: str, limits: UrlLimits) -> bytes:
    """Return the content at an http(s) URL; BadRowError naming `where`."""
    return _with_retries(limits, lambda: _content(url, where, limits))


def download(url: str, where: str, limits: UrlLimits, into: BinaryIO) -> None:
    """Copy the content at an http(s) URL into a file, whatever its size (`max_mib` does not count); BadRowError."""
    _with_retries(limits, lambda: _copied(url, where, limits, into))


def _with_retries(limits: UrlLimits, attempt: Callable[[], Result]) -> Result:
    for number in range(limits.retries):
        try:
            return attempt()
        except _Retryable:
            time.sleep(FIRST_PAUSE_SECONDS * 2**number)
    try:
        return attempt()
    except _Retryable as failure:
        raise failure.error from None


def _content(url: str, where: str, limits: UrlLimits) -> bytes:
    content = bytearray()
    with _opened(url, where, limits) as response:
        _check_size(int(httpx2.Headers(response.headers).get("Content-Length", "0")), where, limits)
        for chunk in response.iter_stream():
            content += chunk
            _check_size(len(content), where, limits)
    return bytes(content)


def _copied(url: str, where: str, limits: UrlLimits, into: BinaryIO) -> None:
    into.seek(0)
    into.truncate()
    with _opened(url, where, limits) as response:
        for chunk in response.iter_stream():
            into.write(chunk)


@contextmanager
def _opened(url: str, where: str, limits: UrlLimits) -> Iterator[httpcore2.Response]:
    """The response of status 200 at the end of the redirects; its body ends complete or in an error."""
    deadline = Deadline(limits.timeout_seconds)
    network = PinnedNetwork(where, deadline, allow_private_addresses=limits.allow_private_addresses)
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
    # an OSError is not caught: httpcore2 wraps those of the network, so it comes from the disk that is written to
    try:
        yield
    except BadRowError:
        raise
    except httpcore2.TimeoutException as error:
        problem = f"the server took more than data.url_timeout_seconds={limits.timeout_seconds:g}"
        raise _Retryable(_bad(where, problem, "url_timeout")) from error
    except (httpcore2.NetworkError, httpcore2.ProtocolError, ValueError) as error:
        problem = f"the server cannot be read ({type(error).__name__}: {str(error)[:120]})"
        raise _Retryable(_bad(where, problem, "url_unreachable")) from error


@contextmanager
def _requested(url: httpx2.URL, network: PinnedNetwork) -> Iterator[httpcore2.Response]:
    """The response to a GET over a connection of its own."""
    target = httpcore2.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path)
    headers: dict[bytes | str, bytes | str] = {
        "Host": url.netloc,
        "User-Agent": f"fovea/{__version__}",
        "Accept-Encoding": "identity",
    }
    # loading the certificates takes milliseconds, which http:// need not spend
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
        raise _bad(where, f"{url[:200]} is no URL ({error})", "url_invalid") from error
    port_exists = parsed.port is None or 0 < parsed.port < 1 << 16
    if parsed.scheme not in {"http", "https"} or not parsed.host or not port_exists:
        raise _bad(where, f"{url[:200]} is no http:// or https:// URL", "url_invalid")
    if parsed.userinfo:
        raise _bad(where, "the URL holds a user name, and none is sent", "url_invalid")
    return parsed


def _check_status(response: httpcore2.Response, where: str) -> None:
    if response.status == 200:
        return
    phrase = bytes(response.extensions.get("reason_phrase", b"")).decode("ascii", "replace")
    problem = f"the server answers {response.status} {phrase}"[:120].rstrip()
    error = _bad(where, problem, f"url_status_{response.status}")
    raise _Retryable(error) if response.status in _TRY_AGAIN else error


def _check_size(num_bytes: int, where: str, limits: UrlLimits) -> None:
    if num_bytes > limits.max_mib * 2**20:
        raise _bad(where, f"the server sends more than data.max_image_mib={limits.max_mib:g}", "image_too_large")


def _bad(where: str, problem: str, reason: str) -> BadRowError:
    return BadRowError(f"{where}: {problem}; correct the row, raise the limit, or set data.on_bad_row=skip", reason)


class FetchedFiles:
    """A cache on disk around `read(url, where)`, of at most `max_gib`; several processes may share its folder.

    An OSError of the disk is raised as it is, and not as a bad row: the row is as good as before.
    """

    # nothing is evicted: an image that was read once is the same in every epoch and after a resume

    def __init__(self, folder: Path, max_gib: float, read: Callable[[str, str], bytes]) -> None:
        delete_abandoned(folder)
        self._folder = folder
        self._left_bytes = max_gib * 2**30 - complete_bytes(folder)
        self._read = read

    def __call__(self, url: str, where: str) -> bytes:
        """The content of a URL, read at most once while there is room for it."""
        file = self._folder / hashlib.sha256(url.encode(errors="replace")).hexdigest()
        if file.exists():
            return file.read_bytes()
        content = self._read(url, where)
        if len(content) <= self._left_bytes:
            write_atomically(file, content)
            self._left_bytes -= len(content)
        return content
