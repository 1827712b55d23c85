"""`fovea serve` as a user starts it, with the real server of an engine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.rollout.short_runs import LIMIT_SECONDS, heed_ctrl_c
from tests.runs import ROOT, command, environment

KEY = "a key of this test"
KEY_ENV = "FOVEA_TEST_KEY"
TINY = {
    "vllm": ["max_model_len=1000", "enforce_eager=true", "max_num_seqs=16", "kv_cache_memory_bytes=134217728"],
    "sglang": ["context_length=1000", "max_running_requests=16"],
}
"""Arguments of small servers, by engine."""


@dataclass(frozen=True)
class Serving:
    process: subprocess.Popen[str]
    url: str

    def wait_until_ready(self) -> str:
        """What the command has printed until then."""
        said = ""
        assert self.process.stdout is not None
        while not (said.endswith("}'\n") or "\nfovea train" in said):
            line = self.process.stdout.readline()
            assert line, f"it ended before it was ready: {said}"
            said += line
        return said

    def processes(self) -> set[int]:
        """The processes that the command has started; none once it has ended."""
        with suppress(psutil.NoSuchProcess):
            return {each.pid for each in psutil.Process(self.process.pid).children(recursive=True)}
        return set()

    def suspend(self) -> None:
        """SIGSTOP for the command and all that it has started: it takes requests, and answers none of them."""
        self._signal(signal.SIGSTOP)

    def kill(self) -> None:
        """SIGKILL for the command and all that it has started."""
        self._signal(signal.SIGKILL)
        self.process.wait()

    def _signal(self, number: signal.Signals) -> None:
        for pid in {self.process.pid, *self.processes()}:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def serving(
    source: Path, *words: str, engine: str = "vllm", port: int | None = None, python: str = sys.executable
) -> Iterator[Serving]:
    """The command for the block, from its start and by this interpreter; it may not be ready yet."""
    port = port or free_port()
    process = subprocess.Popen(
        command("serve", str(source), "--engine", engine, "--port", str(port), *words, *TINY[engine], python=python),
        cwd=ROOT,
        env=environment() | {KEY_ENV: KEY},
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=heed_ctrl_c,  # noqa: PLW1509
    )
    try:
        yield Serving(process=process, url=f"http://127.0.0.1:{port}")
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(LIMIT_SECONDS)
