"""Servers of other packages as processes of the tests."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LIMIT_SECONDS = 60


@contextmanager
def serving(interpreter: str, script: Path) -> Iterator[str]:
    """The address of the server `SCRIPT PORT`, which ends with the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([interpreter, str(script), str(port)])
    try:
        end = time.monotonic() + LIMIT_SECONDS
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert process.poll() is None, f"{script.name} has ended"
            assert time.monotonic() < end, f"{script.name} does not answer"
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()
