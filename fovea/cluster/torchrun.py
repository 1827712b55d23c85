"""Processes that torchrun has started on one machine: their process group, and connections to the first of them."""

from __future__ import annotations

import atexit
import json
import os
import signal
import tempfile
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from fovea.cluster.loopback import gloo_on_loopback
from fovea.cluster.remote import ConnectionLine, RemoteWorker
from fovea.processes.messages import Packing
from fovea.train.ranks import Ranks
from fovea.utils.malloc import GPU_ALLOCATOR
from fovea.utils.torchrun import end_with_torchrun, local_rank, num_local_processes, num_processes
from fovea_gym.errors import ClusterError

TIMEOUT = "fovea/collective_timeout_seconds"
"""Key of the store under which the others find the driver's timeout of collective calls."""
ALLOCATOR = "fovea/gpu_allocator"
"""The same for its settings of torch's allocator on a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Rank and process id of a worker, its first message to the driver."""

    rank: int
    pid: int


def join(timeout_seconds: float | None = None) -> Ranks:
    """Join the process group that torchrun describes, each process with a separate GPU where there are any.

    The driver gives the timeout of collective calls and torch's settings of GPU memory, and the others take them over.
    """
    if num_local_processes() != num_processes():
        raise ClusterError(
            f"torchrun started {num_local_processes()} of {num_processes()} processes on this machine, but a run under "
            "torchrun has to be on one machine; leave out --nnodes, or set it to 1"
        )
    gloo_on_loopback()
    shared, rank, size = next(rendezvous("env://"))
    # torchrun's store outlives a restart: an attempt must not find the addresses of the one before
    store = PrefixStore(f"fovea/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", shared)
    if timeout_seconds is not None:
        store.set(TIMEOUT, str(timeout_seconds))
        store.set(ALLOCATOR, os.environ.get(GPU_ALLOCATOR, ""))
    elif allocator := store.get(ALLOCATOR).decode():
        os.environ.setdefault(GPU_ALLOCATOR, allocator)
    has_gpus = torch.cuda.is_available()
    if has_gpus:
        torch.cuda.set_device(local_rank())
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if has_gpus else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=float(store.get(TIMEOUT))),
    )
    atexit.register(_leave)
    return Ranks.of_process_group("cpu")


def _leave() -> None:
    """Leave the process group, unless an engine that ended has taken it down with its own."""
    if dist.is_initialized():
        dist.destroy_process_group()


def connect_workers(ranks: Ranks, setup: object, heartbeat_timeout_seconds: float) -> list[RemoteWorker]:
    """Wait, as the driver, for a connection from each other process, and send it what it needs to start."""
    # only the user who made it may enter the folder of the socket
    with tempfile.TemporaryDirectory(prefix="fovea-") as folder:
        address = str(Path(folder) / "driver")
        with Listener(address, "AF_UNIX") as listener:
            ranks.gather(address)
            connections = [listener.accept() for _ in range(1, ranks.size)]
    hellos = {connection: Hello(**json.loads(connection.recv_bytes())) for connection in connections}
    for connection in connections:
        connection.send_bytes(Packing().pack(setup))
    # from here on a run whose launcher is killed is saved
    end_with_torchrun(signal.SIGTERM)
    return [
        RemoteWorker(ConnectionLine(connection, hello.pid), hello.rank, heartbeat_timeout_seconds)
        for connection, hello in sorted(hellos.items(), key=lambda each: each[1].rank)
    ]


def connect_to_driver(ranks: Ranks) -> tuple[Connection, object]:
    """Connect, as a worker, to the driver; returns the connection and the driver's setup."""
    connection = Client(ranks.gather(None)[0], "AF_UNIX")
    end_with_torchrun(0)  # but with the driver, which hangs up
    connection.send_bytes(json.dumps(asdict(Hello(rank=ranks.rank, pid=os.getpid()))).encode())
    return connection, Packing().unpack(connection.recv_bytes())
