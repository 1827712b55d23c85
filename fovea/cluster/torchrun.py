"""Processes that torchrun has started on one machine: their process group, and connections to the first of them."""

from __future__ import annotations

import atexit
import tempfile
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

import torch
import torch.distributed as dist

from fovea.cluster.connection import ConnectedWorker
from fovea.cluster.messages import Inbox, Outbox
from fovea.errors import ClusterError
from fovea.train.torch.ranks import Ranks
from fovea.utils.launch import local_rank, num_local_processes, num_processes


def join() -> Ranks:
    """Join the process group that torchrun describes, each process with a GPU of its own where there are any."""
    if num_local_processes() != num_processes():
        raise ClusterError(
            f"torchrun started {num_local_processes()} of {num_processes()} processes on this machine, but a run under "
            "torchrun is of one machine; leave out --nnodes, or set it to 1"
        )
    has_gpus = torch.cuda.is_available()
    if has_gpus:
        torch.cuda.set_device(local_rank())
    dist.init_process_group("cpu:gloo,cuda:nccl" if has_gpus else "gloo")
    atexit.register(dist.destroy_process_group)
    return Ranks.of_process_group("cpu")


def connect_workers(ranks: Ranks, setup: object) -> list[ConnectedWorker]:
    """Wait, as the driver, for a connection from each other process, and send it what it needs to start."""
    # only the user who made it may enter the folder of the socket
    with tempfile.TemporaryDirectory(prefix="fovea-") as folder:
        address = str(Path(folder) / "driver")
        with Listener(address, "AF_UNIX") as listener:
            ranks.gather(address)
            connections = [listener.accept() for _ in range(1, ranks.size)]
    by_rank = {int.from_bytes(connection.recv_bytes(), "big"): connection for connection in connections}
    for connection in connections:
        connection.send_bytes(Outbox().pack(setup))
    return [ConnectedWorker(by_rank[rank], rank) for rank in sorted(by_rank)]


def connect_to_driver(ranks: Ranks) -> tuple[Connection, object]:
    """Connect, as a worker, to the driver; returns the connection and the driver's setup."""
    connection = Client(ranks.gather(None)[0], "AF_UNIX")
    connection.send_bytes(ranks.rank.to_bytes(4, "big"))
    return connection, Inbox().unpack(connection.recv_bytes())
