"""A chat endpoint on 127.0.0.1 that says what a test tells it to."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Endpoint:
    """A server of this test's own on 127.0.0.1: a request gets the next of `replies`, the last for good."""

    def __init__(self, *replies: tuple[int, bytes]) -> None:
        self.replies = list(replies)
        self.requests: list[dict[str, object]] = []
        self.headers: list[dict[str, str]] = []
        self.models = ["tiny"]
        self.running = self.most_running = self.num_gets = 0
        self.delay_seconds = 0.0
        self.lock = threading.Lock()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def _handler(endpoint) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])) or b"{}")
                with endpoint.lock:
                    endpoint.running += 1
                    endpoint.most_running = max(endpoint.most_running, endpoint.running)
                    endpoint.requests.append({"path": self.path, **body})
                    endpoint.headers.append(dict(self.headers.items()))
                    status, content = endpoint.replies.pop(0) if len(endpoint.replies) > 1 else endpoint.replies[0]
                time.sleep(endpoint.delay_seconds)
                with endpoint.lock:
                    endpoint.running -= 1
                self.send_response(status)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def do_GET(self) -> None:
                endpoint.num_gets += 1
                content = json.dumps({"data": [{"id": name} for name in endpoint.models]}).encode()
                self.send_response(200)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None: ...

        return Handler


def says(text: object) -> tuple[int, bytes]:
    return 200, json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode()


@contextmanager
def endpoints() -> Iterator[Callable[..., Endpoint]]:
    """A function that starts servers with given replies; all of them end with the block."""
    started: list[Endpoint] = []

    def start(*replies: tuple[int, bytes]) -> Endpoint:
        started.append(Endpoint(*replies))
        return started[-1]

    yield start
    for endpoint in started:
        endpoint.server.shutdown()
        endpoint.server.server_close()
