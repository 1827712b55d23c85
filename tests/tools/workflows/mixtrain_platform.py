"""The platform's API as the SDK of mixtrain calls it, with an Iceberg catalog in SQLite and files on this disk."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from pyiceberg.catalog.sql import SqlCatalog

WORKSPACE = "lab"


@dataclass
class Platform:
    """Where it is, and the evaluation that was created."""

    url: str
    evaluation: dict[str, Any] = field(default_factory=dict)


@contextmanager
def platform(folder: Path) -> Iterator[Platform]:
    """Serve the endpoints that `Dataset.save` and `Eval.from_dataset` call."""
    secrets = {
        "CATALOG_TYPE": "sql",
        "CATALOG_URI": f"sqlite:///{folder}/catalog.db",
        "CATALOG_WAREHOUSE_URI": f"file://{folder}/warehouse",
    }
    answers = {
        "/workspaces/list": {"data": [{"name": WORKSPACE}]},
        f"/workspaces/{WORKSPACE}/dataset-providers/type/apache_iceberg": {
            "provider_type": "apache_iceberg",
            "secrets": secrets,
        },
    }

    SqlCatalog("default", uri=secrets["CATALOG_URI"]).create_namespace(WORKSPACE)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path.startswith(f"/lakehouse/workspaces/{WORKSPACE}/tables/"):
                return self._send(200, {"column_types": {}})
            return self._send(200 if path in answers else 404, answers.get(path, {"detail": f"no {path}"}))

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path != f"/workspaces/{WORKSPACE}/evaluations/":
                return self._send(404, {"detail": f"no {self.path}"})
            found.evaluation = json.loads(body)
            return self._send(200, found.evaluation)

        def _send(self, status: int, answer: object) -> None:
            body = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found = Platform(f"http://127.0.0.1:{server.server_address[1]}")
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()
