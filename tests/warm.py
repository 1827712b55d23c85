"""Processes of Fovea that begin where their imports have ended: forks of a server that has imported what a run needs.

Five seconds of imports are most of a short test's process. The server is started by the first test that needs it, and
ends with the process of the tests. Its forks are children of that process, so that their ids, signals and deaths are
those of any child; what they print, and how they exit, is that of `python -m`. A test whose subject is the start itself
takes `subprocess`.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch

ROOT = Path(__file__).parents[1]
PR_SET_CHILD_SUBREAPER = 36  # prctl.h
MAX_ANSWER_BYTES = 100


@cache
def server() -> socket.socket:
    """The socket of this process's server, which is started by the first call and ends when the socket is closed."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        subprocess.Popen(
            [sys.executable, "-m", "tests.warm_server", str(theirs.fileno())],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            pass_fds=[theirs.fileno()],
        )
    return ours


@contextmanager
def adopting() -> Iterator[None]:
    """Make grandchildren whose parent ends within the block children of this process; afterwards they are init's."""
    prctl = ctypes.CDLL(None).prctl
    assert prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


class WarmProcess(subprocess.Popen[str]):
    """`python -m module words...` in a fork of the server; a Popen in all else. Needs Linux."""

    def __init__(self, words: Sequence[str], env: Mapping[str, str], **more: Any) -> None:
        super().__init__(["python", "-m", *words], env=env, text=True, **{"cwd": ROOT, **more})

    # a private method, but the one place where Popen makes its process
    def _execute_child(self, args: list[str], *more: Any) -> None:
        cwd, env, pipes = more[4], more[5], more[9:15]  # by position, as Popen calls it
        request = {"argv": args[2:], "env": dict(env), "cwd": os.fspath(cwd)}
        # the child's ends of the three pipes; -1 where it has this process's own stream
        given = [end if end != -1 else number for number, end in enumerate((pipes[0], pipes[3], pipes[5]))]
        channel = server()
        with adopting():
            socket.send_fds(channel, [json.dumps(request).encode()], given)
            self.pid = int(channel.recv(MAX_ANSWER_BYTES))
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def run_warm(
    words: Sequence[str], env: Mapping[str, str], timeout: float, cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` with its output captured."""
    with WarmProcess(words, env, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def run_ranks(target: Callable[..., None], arguments: tuple[Any, ...], nprocs: int) -> None:
    """Run `target(rank, *arguments)` in so many processes to the end; AssertionError with the traceback of one."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.save((target, arguments), folder / "call")
        env = {**os.environ, "PYTHONFAULTHANDLER": "1"}
        started = []
        for rank in range(nprocs):
            with (folder / f"{rank}.err").open("w") as stderr:
                started.append(WarmProcess(["tests.warm_call", str(folder / "call"), str(rank)], env, stderr=stderr))
        try:
            while None in (codes := [each.poll() for each in started]) and not any(codes):
                time.sleep(0.01)
            failed = next((rank for rank, code in enumerate(codes) if code), None)
            message = "" if failed is None else (folder / f"{failed}.err").read_text()
            assert failed is None, f"rank {failed} of {nprocs} ended with code {codes[cast(int, failed)]}:\n{message}"
        finally:
            for each in started:
                each.kill()
                each.wait()
