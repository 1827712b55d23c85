"""A real HTTP server in a thread, with pages that behave and pages that do not."""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote


class Site:
    """What was asked for, and where the server is."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.asked: list[str] = []


@contextmanager
def served(files: Mapping[str, bytes], tls: ssl.SSLContext | None = None) -> Iterator[Site]:
    """Serves `files` by path, and the odd pages below; over TLS with a context of it."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    site = Site(server.server_address[1])
    server.files, server.site = dict(files), site  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield site
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        site, files = self.server.site, self.server.files  # type: ignore[attr-defined]
        site.asked.append(self.path)
        name = unquote(self.path.partition("?")[0])
        if name in files:
            self._send(200, files[name])
        elif name.startswith("/to/"):
            self._send(302, b"", Location=name.removeprefix("/to/"))
        elif name == "/loop":
            self._send(302, b"", Location="/loop")
        elif name.startswith("/status/"):
            self._send(int(name.removeprefix("/status/")), b"no")
        elif name == "/busy-once":
            self._send(200 if site.asked.count(name) > 1 else 503, b"at last")
        elif name in {"/drip", "/drip-headers"}:
            self._drip(headers=name == "/drip-headers")
        elif name in {"/endless", "/endless-redirect"}:
            self._endless(302 if name == "/endless-redirect" else 200, Location="/a.png")
        elif name == "/short":
            self._send(200, b"half", **{"Content-Length": "8"})
        else:
            self._send(404, b"no such page")

    def _send(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body)

    def _drip(self, *, headers: bool = False) -> None:
        """A byte now and then, for ever: no read of a socket ever waits long."""
        self.send_response(200)
        self.flush_headers() if headers else self.end_headers()
        try:
            while True:
                self.wfile.write(b".")
                self.wfile.flush()
                time.sleep(0.05)
        except OSError:
            pass

    def _endless(self, status: int, **headers: str) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()
        try:
            while True:
                self.wfile.write(bytes(1 << 16))
        except OSError:
            pass

    def log_message(self, *_: object) -> None: ...
