"""Ray beside any cluster of this machine's user: for runs that start one, and a cluster that runs share."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import psutil
import pytest

from fovea.cluster.ray_token import make_token
from tests.runs import ROOT, command, environment

NODE_CPUS = (3, 1, 1)
"""CPUs of each node of the shared cluster, the head first."""


@contextmanager
def own_ray() -> Iterator[dict[str, str]]:
    """Environment variables by which Ray has folders and a separate token, for the block."""
    # not pytest's folder: the names of Ray's sockets are limited to 107 characters
    with (
        tempfile.TemporaryDirectory(prefix="fv", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("RAY_AUTH_TOKEN_PATH", f"{folder}/token")
        make_token()
        own = {"RAY_TMPDIR": folder, "RAY_AUTH_TOKEN_PATH": f"{folder}/token", "RAY_AUTH_MODE": "token"}
        # Ray lowers the priority of its workers, so that tests beside these would take all of two cores
        yield {**environment(), **own, "RAY_worker_niceness": "0"}


@dataclass(slots=True)
class RayCluster:
    """A cluster whose nodes are all on this machine."""

    environment: dict[str, str]
    """Environment in which a run finds the cluster."""
    address: str = ""
    """Where further nodes join it; empty before the head has started."""
    sessions: set[int] = field(default_factory=set)
    """Ids of the sessions of its processes."""

    def start(self, *arguments: str) -> str:
        """Start a node by `fovea cluster start`; returns what the command prints."""
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
        words = command("cluster", "start", *arguments)
        with subprocess.Popen(words, cwd=ROOT, env=self.environment, **pipes) as process:
            self.sessions.add(process.pid)
            said, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        return said

    def join(self, num_cpus: int) -> None:
        """Start a further node."""
        self.start(f"--address={self.address}", f"--num-cpus={num_cpus}")

    def processes(self) -> list[psutil.Process]:
        found = []
        for each in psutil.process_iter():
            with suppress(ProcessLookupError):
                if os.getsid(each.pid) in self.sessions:
                    found.append(each)
        return found

    def kill(self) -> None:
        for each in self.processes():
            with suppress(psutil.NoSuchProcess):
                each.send_signal(signal.SIGKILL)


@contextmanager
def cluster_of(*num_cpus: int) -> Iterator[RayCluster]:
    """Nodes with so many CPUs on the loopback interface, which runs find as those of a user find theirs."""
    with own_ray() as own:
        cluster = RayCluster(own)
        try:
            with socket.create_server(("127.0.0.1", 0)) as free:
                # Ray's own ports begin at 10001
                port = 1024 + free.getsockname()[1] % 8000
            said = cluster.start(f"--port={port}", f"--num-cpus={num_cpus[0]}")
            cluster.address = said.rpartition("fovea cluster start --address ")[2].strip()
            for more in num_cpus[1:]:
                cluster.join(more)
            yield cluster
        finally:
            cluster.kill()
