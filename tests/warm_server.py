"""The process that tests/warm.py forks: imports what a run needs, then makes a child of its caller for each request."""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import random
import runpy
import signal
import socket
import sys
from typing import Any

import numpy as np

MAX_REQUEST_BYTES = 1 << 20


def serve(channel: socket.socket) -> list[str]:
    """Fork for each request until the caller ends; returns in the forks, with the words of their command."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests, which then end this process
    gc.freeze()
    while True:
        message, files, _, _ = socket.recv_fds(channel, MAX_REQUEST_BYTES, 3)
        if not message:
            os._exit(0)
        there, here = os.pipe()
        middle = os.fork()
        if middle == 0:
            if (child := os.fork()) == 0:
                channel.close()
                os.close(there)
                os.close(here)
                return become(json.loads(message), files)
            os.write(here, str(child).encode())
            os._exit(0)
        os.waitpid(middle, 0)  # now the caller is the parent of the fork
        channel.send(os.read(there, 100))
        for each in (there, here, *files):
            os.close(each)


def become(request: dict[str, Any], files: list[int]) -> list[str]:
    """Make this process what `python -m` would have started; returns the module and its words."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    for each in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(each, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    by_line = bool(os.environ.get("PYTHONUNBUFFERED")) or os.isatty(1)
    sys.stdout = open(1, "w", buffering=1 if by_line else -1, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    random.seed()
    np.random.seed()
    words: list[str] = request["argv"]
    return words


def serve_and_run() -> None:
    name, *sys.argv[1:] = serve(socket.socket(fileno=int(sys.argv[1])))
    runpy.run_module(name, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    serve_and_run()
