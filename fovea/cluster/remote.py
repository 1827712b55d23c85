"""A worker in another process: the driver's handle, the lines between both, and the rules of the worker's calls."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any, Protocol

from fovea.cluster.workers import Worker, is_collective, make_call
from fovea.errors import LostWorkerError
from fovea.processes.calls import Call, RemoteCalls
from fovea.processes.heartbeat import BEAT, Watch
from fovea.processes.serving import Rules, hang_up
from fovea_gym.errors import ClusterError
from fovea_gym.processes.ending import kill_below


class WorkerLine(Protocol):
    """The driver's end of a line to a worker, whose messages arrive in order."""

    async def send(self, message: bytes) -> None:
        """Return once the worker is sure to receive the message; OSError if it has ended."""
        ...

    def receive(self) -> bytes:
        """Block until a message arrives; EOFError or OSError once the worker has ended."""
        ...

    def hang_up(self) -> None:
        """Close the line, which ends the worker and `receive`."""
        ...

    def kill(self) -> None:
        """Close the line and kill the worker's process, which may be stopped."""
        ...


class RemoteWorker:
    """A `WorkerHandle` over a line."""

    def __init__(self, line: WorkerLine, rank: int, heartbeat_timeout_seconds: float) -> None:
        """`heartbeat_timeout_seconds` is the silence after which the worker is killed."""
        self.line = line
        self._heartbeat_timeout_seconds = heartbeat_timeout_seconds
        self._is_silent = False
        self._last_call = "its start"
        self.rank = rank
        self._collective: set[Future[Any]] = set()
        """Pending results of collective calls."""
        self._sending = asyncio.Lock()
        self._queued: list[tuple[int, Call]] = []
        self._flush: asyncio.Task[None] | None = None
        self._watch = Watch(heartbeat_timeout_seconds, self._kill)
        self._calls = RemoteCalls(self._next_answer, self._line_ended)
        self._calls.reader.start()

    @property
    def lost(self) -> LostWorkerError | None:
        return self._calls.lost

    @property
    def image_bytes(self) -> int:
        return self._calls.packing.image_bytes

    @property
    def sent_bytes(self) -> int:
        return self._calls.packing.packed_bytes

    def forget_images(self) -> None:
        if not self._collective:
            self._calls.packing.forget()

    async def start(self, call: Call) -> Awaitable[Any]:
        """Send a call, in one message with all other calls of this iteration of the event loop."""
        # one message: an engine that received requests one by one would prefill only the first one
        number, answer = self._calls.add()
        if is_collective(call):
            self._collective.add(answer)
            answer.add_done_callback(self._collective.discard)
        self._queued.append((number, call))
        self._last_call = call.method
        if self._flush is None:
            self._flush = asyncio.create_task(self._send_queued())
        await asyncio.shield(self._flush)
        # a line may accept messages that nobody reads: a Ray actor outlives the loop that served its calls
        if self.lost is not None and not answer.done():
            raise self.lost
        return asyncio.wrap_future(answer)

    async def close(self) -> None:
        """Close the line, which ends the worker."""
        self._watch.end()
        self.line.hang_up()
        await asyncio.to_thread(self._calls.reader.join)

    async def _send_queued(self) -> None:
        await asyncio.sleep(0)  # lets the other calls of this event loop iteration queue up
        calls, self._queued, self._flush = self._queued, [], None
        async with self._sending:
            message = self._calls.packing.pack(calls)
            try:
                await self.line.send(message)
            except OSError as error:
                raise self._gone(error) from error

    def _next_answer(self) -> bytes:
        message = BEAT
        while message == BEAT:
            message = self.line.receive()
            self._watch.heard()
        return message

    def _line_ended(self, error: Exception) -> LostWorkerError:
        self._watch.end()
        return self._gone(error)

    def _kill(self) -> None:
        self._is_silent = True
        # this also frees the other ranks: they leave the collective calls in which they wait for this worker
        self.line.kill()

    def _gone(self, error: Exception) -> LostWorkerError:
        if self._is_silent:
            return LostWorkerError(
                f"the worker process of rank {self.rank} hangs: for cluster.heartbeat_timeout_seconds="
                f"{self._heartbeat_timeout_seconds} nothing was received from it, in {self._last_call}, its last call; "
                "it was killed; start again to continue from the last checkpoint (max_restarts does this)"
            )
        return LostWorkerError(
            f"the worker process of rank {self.rank} has ended ({str(error) or 'its connection has closed'}); its "
            "error message, if it printed one, is above; start again to continue from the last checkpoint"
        )


def rules_of(worker: Worker) -> Rules:
    """The rules of a worker's calls: an error in a collective call ends the process, since others may wait in it."""
    return Rules(make=lambda call: make_call(call, worker), error_of=_picklable, is_collective=is_collective)


def _picklable(error: BaseException) -> BaseException:
    """A copy of an OSError, or a ClusterError with the text of any other error."""
    if isinstance(error, OSError) and error.errno is not None:
        return OSError(error.errno, error.strerror)
    return ClusterError(f"{type(error).__name__}: {error}")


class ConnectionLine:
    """A `WorkerLine` over a connection."""

    def __init__(self, connection: Connection, pid: int | None = None) -> None:
        """`pid` is the id of the worker's process, if it has a separate process."""
        self._connection = connection
        self.pid = pid

    async def send(self, message: bytes) -> None:
        await asyncio.to_thread(self._connection.send_bytes, message)

    def receive(self) -> bytes:
        return self._connection.recv_bytes()

    def hang_up(self) -> None:
        hang_up(self._connection)

    def kill(self) -> None:
        if self.pid is not None:
            kill_below(self.pid)
        self.hang_up()
