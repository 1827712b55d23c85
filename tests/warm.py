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
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
PR_SET_CHILD_SUBREAPER = 36  # prctl.h
MAX_ANSWER_BYTES = 100
server_module = "tests.warm_server"
"""What the server runs; tests that need other imports set it before their first process."""
PROCESS_NUMBER = "FOVEA_TEST_PROCESS_NUMBER"
"""Environment variable of each process of `run_ranks`."""


@cache
def server() -> socket.socket:
    """The socket of this process's server, which is started by the first call and ends when the socket is closed."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        subprocess.Popen(
            [sys.executable, "-m", server_module, str(theirs.fileno())],
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


def start_rank(
    target: Callable[..., None], rank: int, arguments: tuple[Any, ...], folder: Path, **more: Any
) -> WarmProcess:
    """Start `target(rank, *arguments)`; the call stands in a file of `folder`."""
    call = folder / f"call-{rank}"
    torch.save((target, arguments), call)
    env = {**os.environ, PROCESS_NUMBER: str(rank), "PYTHONFAULTHANDLER": "1"}
    return WarmProcess(["tests.warm_call", str(call)], env, **more)


def run_ranks(target: Callable[..., None], arguments: tuple[Any, ...], nprocs: int) -> None:
    """Run `target(rank, *arguments)` in so many processes to the end; AssertionError with the traceback of one."""
    with tempfile.TemporaryDirectory() as folder:
        call = Path(folder) / "call"
        torch.save((target, arguments), call)
        given = [{**os.environ, PROCESS_NUMBER: str(rank), "PYTHONFAULTHANDLER": "1"} for rank in range(nprocs)]
        run_together(["tests.warm_call", str(call)], given)


def run_together(words: Sequence[str], environments: Sequence[Mapping[str, str]]) -> str:
    """Run a command in a process per environment; returns what they print, AssertionError where one fails.

    The first failure ends the others.
    """
    with tempfile.TemporaryDirectory() as name, ExitStack() as opened:
        folder, started = Path(name), []
        for number, env in enumerate(environments):
            streams = [opened.enter_context((folder / f"{number}.{kind}").open("w")) for kind in ("out", "err")]
            started.append(WarmProcess(words, env, stdout=streams[0], stderr=streams[1]))
        try:
            while None in (codes := [each.poll() for each in started]) and not any(codes):
                time.sleep(0.01)
        finally:
            for each in started:
                each.kill()
                each.wait()
        printed = [(folder / f"{number}.out").read_text() for number in range(len(started))]
        for number, code in enumerate(codes):
            errors = (folder / f"{number}.err").read_text()
            assert not code, f"process {number} of {len(started)} ended with code {code}:\n{printed[number]}{errors}"
        return "".join(printed)
