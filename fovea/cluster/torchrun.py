"""Processes that torchrun started on one machine: their process group, and their connections to the driver."""

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
"""Key in the store under which the other processes find the driver's timeout of collective calls."""
ALLOCATOR = "fovea/gpu_allocator"
"""Key in the store for the driver's settings of torch's GPU allocator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The first message of a worker to the driver: its rank and process id."""

    rank: int
    pid: int


def join(timeout_seconds: float | None = None) -> Ranks:
    """Join the process group that torchrun describes, each process with a separate GPU if there are GPUs.

    The driver passes the timeout of collective calls; the other processes adopt it, and its GPU allocator settings.
    """
    if num_local_processes() != num_processes():
        raise ClusterError(
            f"torchrun started {num_local_processes()} of {num_processes()} processes on this machine, but a run under "
            "torchrun has to be on one machine; leave out --nnodes, or set it to 1"
        )
    gloo_on_loopback()
    shared, rank, size = next(rendezvous("env://"))
    # torchrun's store outlives a restart: an attempt must not find the addresses of an earlier attempt
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
    """Leave the process group, unless an engine has destroyed it when it ended."""
    if dist.is_initialized():
        dist.destroy_process_group()


def connect_workers(ranks: Ranks, setup: object, heartbeat_timeout_seconds: float) -> list[RemoteWorker]:
    """Wait, as the driver, for a connection from each other process, and send it the setup."""
    # only the user who created the folder of the socket may enter it
    with tempfile.TemporaryDirectory(prefix="fovea-") as folder:
        address = str(Path(folder) / "driver")
        with Listener(address, "AF_UNIX") as listener:
            ranks.gather(address)
            connections = [listener.accept() for _ in range(1, ranks.size)]
    hellos = {connection: Hello(**json.loads(connection.recv_bytes())) for connection in connections}
    for connection in connections:
        connection.send_bytes(Packing().pack(setup))
    # from here on, the run is saved if its launcher is killed
    end_with_torchrun(signal.SIGTERM)
    return [
        RemoteWorker(ConnectionLine(connection, hello.pid), hello.rank, heartbeat_timeout_seconds)
        for connection, hello in sorted(hellos.items(), key=lambda each: each[1].rank)
    ]


def connect_to_driver(ranks: Ranks) -> tuple[Connection, object]:
    """Connect, as a worker, to the driver; returns the connection and the driver's setup."""
    connection = Client(ranks.gather(None)[0], "AF_UNIX")
    end_with_torchrun(0)  # ends with the driver instead, which closes the connection
    connection.send_bytes(json.dumps(asdict(Hello(rank=ranks.rank, pid=os.getpid()))).encode())
    return connection, Packing().unpack(connection.recv_bytes())
