"""Workers that Ray starts, on one or several nodes; the only module that imports ray (extra: ray).

Each worker is an actor, which serves the calls of the driver as a process of torchrun does. Messages to it are
arguments of its method `deliver`; answers and heartbeats are items of the stream that its method `answers` returns.
The workers of a node have consecutive ranks.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's stubs leave it out

from fovea.cluster.loopback import gloo_on_loopback, is_loopback, listen_at, running_cluster
from fovea.cluster.ray_token import make_token
from fovea.cluster.remote import RemoteWorker, rules_of
from fovea.cluster.workers import Worker
from fovea.config.sections import Cluster
from fovea.processes.heartbeat import beating
from fovea.processes.serving import serve
from fovea.utils.installing import pip_install
from fovea.utils.malloc import GPU_ALLOCATOR
from fovea_gym.errors import ClusterError, ConfigError, FoveaError, MissingExtraError

try:
    import ray
    from ray.exceptions import RayActorError, RayError, RayTaskError
    from ray.util import get_node_ip_address, placement_group, remove_placement_group
    from ray.util.placement_group import PlacementGroup
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ModuleNotFoundError as error:
    raise MissingExtraError(
        f"cluster.gpus_per_node is set, but {error.name} is not installed; {pip_install('ray')}, or leave "
        "cluster.gpus_per_node out and start the processes with torchrun"
    ) from error

PLACEMENT_SECONDS = 5.0
"""Longest time that Ray takes to reserve free GPUs, and interval of the messages about missing GPUs."""
OWN_CLUSTER_SECONDS = 60.0
"""Longest time to reserve GPUs in a cluster that Ray has just started on a busy machine."""
KNOCK_SECONDS = 10.0
"""Longest wait for the head node of a cluster to accept a connection."""
LOOK_SECONDS = 0.05
"""Interval of checks on Ray's servers: Ray ends a process within about a second after its raylet has ended."""
SERVERS = ("gcs_server", "raylet")
"""Ray's names of the processes that a run needs; if an agent of the raylet ends, the raylet ends too."""
ANSWERS = "answers"
"""The concurrency group of the stream of answers: a separate event loop, which keeps running while a call blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Address, world size and rank for `init_process_group`."""

    host: str
    port: int
    rank: int
    size: int
    timeout_seconds: float
    """Timeout of collective calls."""
    allocator: str | None
    """The driver's settings of torch's GPU allocator."""


class RayWorker:
    """The actor of one worker."""

    def __init__(self) -> None:
        self._incoming = asyncio.Queue[bytes | None]()
        self._store: TCPStore | None = None
        self._worker: Worker | None = None
        self._calls: asyncio.AbstractEventLoop | None = None
        """The event loop of all methods except `answers`."""

    async def meeting_point(self) -> tuple[str, int]:
        """Open the store on this node by which the workers of the run find each other; returns its host and port."""
        host = get_node_ip_address()
        # by default, the store would listen on all addresses of the node
        listening = listen_at(host)
        port = listening.getsockname()[1]
        self._store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())
        return host, port

    async def open(self, rendezvous: Rendezvous, make: Callable[[], Worker]) -> None:
        """Join the process group of all workers, and make the services of this worker."""
        # the variables by which torchrun describes a process; Ray shows an actor only its own GPUs
        os.environ |= {"RANK": str(rendezvous.rank), "WORLD_SIZE": str(rendezvous.size), "LOCAL_RANK": "0"}
        if rendezvous.allocator is not None:
            os.environ.setdefault(GPU_ALLOCATOR, rendezvous.allocator)
        timeout = timedelta(seconds=rendezvous.timeout_seconds)
        if is_loopback(rendezvous.host):
            gloo_on_loopback()
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
            store=TCPStore(rendezvous.host, rendezvous.port, is_master=False, timeout=timeout),
            rank=rendezvous.rank,
            world_size=rendezvous.size,
            timeout=timeout,
        )
        self._worker, self._calls = make(), asyncio.get_running_loop()

    async def deliver(self, message: bytes) -> None:
        self._incoming.put_nowait(message)

    @ray.method(concurrency_group=ANSWERS)
    async def answers(self, heartbeat_timeout_seconds: float) -> AsyncIterator[bytes]:
        """Serve the calls that `deliver` receives; yields the answers, with heartbeats between them."""
        assert self._worker is not None, "calls to a worker that was not opened"
        assert self._calls is not None
        loop, outgoing = asyncio.get_running_loop(), asyncio.Queue[bytes | None]()

        def put(message: bytes | None) -> None:
            loop.call_soon_threadsafe(outgoing.put_nowait, message)

        async def send(message: bytes) -> None:
            put(message)

        calls = serve(self._worker, self._incoming, send, rules_of(self._worker))
        serving = asyncio.run_coroutine_threadsafe(calls, self._calls)
        serving.add_done_callback(lambda _: put(None))
        with beating(put, heartbeat_timeout_seconds):
            while (message := await outgoing.get()) is not None:
                yield message
        serving.result()


class RayLine:
    """A `WorkerLine` to an actor."""

    def __init__(self, actor: Any, heartbeat_timeout_seconds: float) -> None:
        self._actor = actor
        self._answers = actor.answers.remote(heartbeat_timeout_seconds)

    async def send(self, message: bytes) -> None:
        try:
            await self._actor.deliver.remote(message)
        except RayError as error:
            raise OSError(_in_one_line(error)) from error

    def receive(self) -> bytes:
        try:
            message: bytes = ray.get(next(self._answers))
        except StopIteration:
            raise EOFError from None
        except RayError as error:
            raise EOFError(_in_one_line(error)) from error
        return message

    def hang_up(self) -> None:
        ray.kill(self._actor)

    def kill(self) -> None:
        self.hang_up()


class RayWorkers:
    """The workers of a run on Ray."""

    def __init__(self, cluster: Cluster, make: Callable[[], Worker], *, device: str) -> None:
        """Start all workers; `make` makes the services of a worker, in its process.

        `device` is `model.device`. ConfigError if the cluster has no room for the workers; errors of `make` are raised.
        """
        self._owns_cluster = connect(cluster)
        self._bundles: PlacementGroup | None = None
        self._closed = threading.Event()
        if self._owns_cluster:
            threading.Thread(target=_end_with_servers, args=(self._closed,), name="watch of Ray", daemon=True).start()
        try:
            has_gpus = device == "cuda" or (device == "auto" and ray.cluster_resources().get("GPU"))
            resource = "GPU" if has_gpus else "CPU"
            self._bundles = _reserve(cluster, resource, owned=self._owns_cluster)
            assert cluster.gpus_per_node is not None
            nodes = [rank // cluster.gpus_per_node for rank in range(cluster.num_ray_workers)]
            actors = [_start(self._bundles, node, resource) for node in nodes]
            host, port = _result(actors[0].meeting_point.remote())
            first = Rendezvous(
                host=host,
                port=port,
                rank=0,
                size=len(actors),
                timeout_seconds=cluster.collective_timeout_seconds,
                allocator=os.environ.get(GPU_ALLOCATOR),
            )
            rendezvous = [replace(first, rank=rank) for rank in range(len(actors))]
            _result([actor.open.remote(each, make) for actor, each in zip(actors, rendezvous, strict=True)])
        except BaseException:
            self.close()
            raise
        silence = cluster.heartbeat_timeout_seconds
        self.handles = [RemoteWorker(RayLine(actor, silence), rank, silence) for rank, actor in enumerate(actors)]

    def close(self) -> None:
        """End the workers that still run, and the cluster if this run started it."""
        self._closed.set()
        if self._owns_cluster:
            ray.shutdown()
        elif self._bundles is not None:
            remove_placement_group(self._bundles)


def connect(cluster: Cluster) -> bool:
    """Connect to a running cluster, else start one on this machine; returns True if it was started."""
    if ray.is_initialized():
        return False
    if address := running_cluster():
        try:
            # Ray would retry for more than five minutes where nothing listens
            host, _, port = address.rpartition(":")
            if "/" not in host and port.isdecimal():
                socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCK_SECONDS).close()
            _init(address=address)
        except (RayError, OSError) as error:
            raise ClusterError(
                f"no connection to the Ray cluster at {address}: {_in_one_line(error)}; see `fovea cluster status`, "
                "and run `fovea cluster stop` if it has crashed, or unset RAY_ADDRESS"
            ) from error
        return False
    if cluster.num_nodes > 1:
        raise ConfigError(
            f"cluster.num_nodes={cluster.num_nodes}, but this machine is not in a Ray cluster; run `fovea cluster "
            "start` here and `fovea cluster start --address HEAD` on the others, or set RAY_ADDRESS"
        )
    make_token()
    # Ray only counts CPUs and does not limit their use, so small runs may have more workers than cores
    num_cpus = max(cluster.num_ray_workers, os.cpu_count() or 1)
    _init(address="local", num_cpus=num_cpus, include_dashboard=False)
    return True


def _end_with_servers(closed: threading.Event) -> None:
    """End this process with the exit code of a lost worker when a server ends that Ray started for it.

    Ray would end the process with code 1: silently and at once after its raylet ends, a minute after its GCS ends.
    """
    node: Any = ray._private.worker._global_node
    while not closed.wait(LOOK_SECONDS):
        ended = [name for name, _ in node.dead_processes() if name in SERVERS]
        if ended and not closed.is_set():
            print(
                f"error: Ray's server {ended[0]} has ended, and with it the workers; start again to continue from the "
                "last checkpoint (max_restarts does this)",
                file=sys.stderr,
                flush=True,
            )
            # without their GCS, agents and workers would not notice for minutes that their raylet has ended
            for each in node.all_processes.get("raylet", []):
                _kill_children(each.process.pid)
            os._exit(ClusterError.exit_code)


def _kill_children(process: int) -> None:
    for children in Path(f"/proc/{process}/task").glob("*/children"):
        for child in children.read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(child), signal.SIGKILL)


def _init(**options: Any) -> None:
    """Call `ray.init` without logs on the terminal and without Ray's SIGTERM handler, which would end a run unsaved."""
    before = signal.getsignal(signal.SIGTERM)
    ray.init(**options, log_to_driver=False, logging_level=logging.ERROR)
    # Ray also sets its handler only in the main thread
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)


def _reserve(cluster: Cluster, resource: str, *, owned: bool) -> PlacementGroup:
    """Reserve one bundle per node of the run, and print what is missing; ConfigError if time runs out."""
    wait_seconds, fix = OWN_CLUSTER_SECONDS, "lower cluster.gpus_per_node"
    if not owned:
        minutes = cluster.wait_minutes
        wait_seconds = 60 * minutes
        fix = f"lower these settings, add nodes with `fovea cluster start`, or raise cluster.wait_minutes={minutes:g}"
    elif max(_of_nodes(resource), default=0) < (cluster.gpus_per_node or 0):
        # waiting is pointless: nobody adds a node to the cluster that this run started
        raise ConfigError(f"{_missing(cluster, resource)}; {fix}")
    bundles = [{resource: float(cluster.gpus_per_node or 0)}] * cluster.num_nodes
    group: PlacementGroup = placement_group(bundles, strategy="STRICT_SPREAD")
    deadline, printed = time.monotonic() + wait_seconds, ""
    while not group.wait(PLACEMENT_SECONDS):
        missing = _missing(cluster, resource)
        if time.monotonic() >= deadline:
            remove_placement_group(group)
            raise ConfigError(f"{missing}; {fix}")
        if missing != printed:
            print(f"waiting for the Ray cluster: {missing}", file=sys.stderr, flush=True)
            printed = missing
    return group


def _missing(cluster: Cluster, resource: str) -> str:
    """Message with the number of GPUs (on CPUs: cores) that the run needs and that the cluster has."""
    nodes = [f"{number:g}" for number in _of_nodes(resource)]
    free = ray.available_resources().get(resource, 0)
    return (
        f"cluster.num_nodes={cluster.num_nodes} and cluster.gpus_per_node={cluster.gpus_per_node} need "
        f"{cluster.gpus_per_node} {resource}s on each of {cluster.num_nodes} nodes; the cluster's {len(nodes)} nodes "
        f"have {', '.join(nodes)}, of which {free:g} are free"
    )


def _of_nodes(resource: str) -> list[float]:
    """Number of GPUs (on CPUs: cores) of each node of the cluster, free or not."""
    return [node["Resources"].get(resource, 0.0) for node in ray.nodes() if node["Alive"]]


def _start(bundles: PlacementGroup, node: int, resource: str) -> Any:
    with_groups: Any = ray.remote(concurrency_groups={ANSWERS: 1})  # type: ignore[call-overload]  # left out of its types
    actor = with_groups(RayWorker).options(
        num_cpus=1 if resource == "CPU" else 0,
        num_gpus=1 if resource == "GPU" else 0,
        scheduling_strategy=PlacementGroupSchedulingStrategy(bundles, placement_group_bundle_index=node),
    )
    return actor.remote()


def _result(calls: Any) -> Any:
    """The results of actor calls; an error of Fovea is raised as it is, any other error as ClusterError."""
    try:
        return ray.get(calls)
    except RayTaskError as error:
        if isinstance(error.cause, FoveaError):
            raise error.cause from error
        raise ClusterError(f"a worker could not start: {_in_one_line(error)}") from error
    except RayActorError as error:
        raise ClusterError(f"a worker ended while it started: {_in_one_line(error)}") from error


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split())
