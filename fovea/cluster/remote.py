"""A worker in another process: the driver's handle, and the loop that serves its calls, over any line between them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection
from signal import SIGKILL
from socket import SHUT_RDWR, socket
from threading import Lock, Thread
from typing import Any, NoReturn, Protocol, TypeAlias

from fovea.cluster.workers import Call, Worker
from fovea.errors import ClusterError, FoveaError, LostWorkerError, result_or_error
from fovea.processes.heartbeat import BEAT, Watch
from fovea.processes.messages import Packing

Numbered: TypeAlias = tuple[int, Call]
"""A call and its number, by which its answer names it."""


class Line(Protocol):
    """The driver's end of a way to a worker, for messages that arrive in order."""

    async def send(self, message: bytes) -> None:
        """Returns once the worker is sure to receive the message; OSError if it has ended."""
        ...

    def receive(self) -> bytes:
        """Block until a message arrives; EOFError or OSError once the worker has ended."""
        ...

    def hang_up(self) -> None:
        """End the line, upon which the worker ends, and `receive` too."""
        ...

    def kill(self) -> None:
        """End the line and the worker's process, whatever it does: it may be stopped."""
        ...


class RemoteWorker:
    """A `WorkerHandle` over a line."""

    def __init__(self, line: Line, rank: int, heartbeat_timeout_seconds: float) -> None:
        """`heartbeat_timeout_seconds` is the silence after which the worker is killed."""
        self.line = line
        self._heartbeat_timeout_seconds = heartbeat_timeout_seconds
        self._is_silent = False
        self._last_call = "its start"
        self.rank = rank
        self._packing = Packing()
        self._sending = asyncio.Lock()
        self._queued: list[Numbered] = []
        self._flush: asyncio.Task[None] | None = None
        self._num_calls = 0
        self._running: dict[int, Future[Any]] = {}
        self.lost: LostWorkerError | None = None
        """Set once no answer can arrive any more."""
        self._watch = Watch(heartbeat_timeout_seconds, self._kill)
        self._receiver = Thread(target=self._receive, name=f"answers of rank {rank}", daemon=True)
        self._receiver.start()

    @property
    def image_bytes(self) -> int:
        return self._packing.image_bytes

    @property
    def sent_bytes(self) -> int:
        return self._packing.packed_bytes

    def forget_images(self) -> None:
        self._packing.forget()

    async def start(self, call: Call) -> Awaitable[Any]:
        """Send a call, in one message with all others of this turn of the event loop."""
        # one message: an engine that got requests one by one would prefill the first of them only
        number, answer = self._num_calls, Future[Any]()
        # a caller that is cancelled waits no longer, but its answer still arrives
        answer.set_running_or_notify_cancel()
        self._num_calls += 1
        self._running[number] = answer
        self._queued.append((number, call))
        self._last_call = f"{call.service}.{call.method}"
        if self._flush is None:
            self._flush = asyncio.create_task(self._send_queued())
        await asyncio.shield(self._flush)
        # a line may take messages that nobody reads: an actor of Ray outlives the loop that served its calls
        if self.lost is not None and not answer.done():
            raise self.lost
        return asyncio.wrap_future(answer)

    async def close(self) -> None:
        """Hang up, upon which the worker ends."""
        self._watch.end()
        self.line.hang_up()
        await asyncio.to_thread(self._receiver.join)

    async def _send_queued(self) -> None:
        await asyncio.sleep(0)  # lets the other calls of this turn queue up
        calls, self._queued, self._flush = self._queued, [], None
        async with self._sending:
            message = self._packing.pack(calls)
            try:
                await self.line.send(message)
            except OSError as error:
                raise self._gone(error) from error

    def _receive(self) -> None:
        """Hand answers to their callers until the line ends; then fail those that still wait."""
        # whatever it ends by: of a thread that died silently the callers would wait for ever
        _, ended = result_or_error(self._hand_over_answers)
        assert isinstance(ended, Exception), ended
        self._watch.end()
        # set first: a call that comes too late for the loop below finds it
        self.lost = self._gone(ended)
        # a copy: the loop's thread may be adding a call
        for answer in list(self._running.values()):
            answer.set_exception(self.lost)

    def _hand_over_answers(self) -> NoReturn:
        while True:
            message = self.line.receive()
            self._watch.heard()
            if message == BEAT:
                continue
            number, result, error = self._packing.unpack(message)
            answer = self._running.pop(number)
            if error is None:
                answer.set_result(result)
            else:
                answer.set_exception(error)

    def _kill(self) -> None:
        self._is_silent = True
        # also for the other ranks: they leave the collective calls in which they wait for it
        self.line.kill()

    def _gone(self, error: Exception) -> LostWorkerError:
        if self._is_silent:
            return LostWorkerError(
                f"the worker process of rank {self.rank} hangs: for cluster.heartbeat_timeout_seconds="
                f"{self._heartbeat_timeout_seconds} nothing was heard of it, in {self._last_call}, its last call; it "
                "was killed; start again to go on from the last checkpoint (max_restarts does)"
            )
        return LostWorkerError(
            f"the worker process of rank {self.rank} has ended ({str(error) or 'its connection has closed'}); its own "
            "message, if it had time for one, is above; start again to go on from the last checkpoint"
        )


async def serve(
    worker: Worker, messages: asyncio.Queue[bytes | None], send: Callable[[bytes], Awaitable[None]]
) -> None:
    """Make the calls that arrive until a None does, then close the worker; `send` sends a message to the driver.

    Errors of an engine, and of files, go back to their caller. An error in a collective call ends this process as well,
    since the other workers may be waiting in that call. Requests that are still running at the None are dropped: the
    driver has left, and wants no answer.
    """
    packing, sending, running = Packing(), asyncio.Lock(), set[asyncio.Task[Any]]()

    async def answer(number: int, call: Call, task: asyncio.Task[Any]) -> None:
        await asyncio.wait([task])
        if task.cancelled():
            return
        error = task.exception()
        result = task.result() if error is None else None
        # without a driver that reads it, the None is next
        with suppress(OSError):
            async with sending:
                await send(packing.pack((number, result, _picklable(error))))
        if error is not None and call.is_collective:
            raise error

    try:
        async with asyncio.TaskGroup() as tasks:
            while (message := await messages.get()) is not None:
                for number, call in packing.unpack(message):
                    task = asyncio.create_task(call.run(worker))
                    if not call.is_collective:
                        running.add(task)
                        task.add_done_callback(running.discard)
                    tasks.create_task(answer(number, call, task))
            for each in running:
                each.cancel()
    except ExceptionGroup as group:
        # of the calls that failed together, the first: its type gives this process its message and its exit code
        raise group.exceptions[0] from None
    finally:
        await worker.close()


def _picklable(error: BaseException | None) -> BaseException | None:
    """Fovea's own errors and those of files as they are, any other as its text: it may hold what cannot be sent."""
    if error is None or isinstance(error, FoveaError):
        return error
    if isinstance(error, OSError) and error.errno is not None:
        return OSError(error.errno, error.strerror)
    return ClusterError(f"{type(error).__name__}: {error}")


class ConnectionLine:
    """A `Line` over a connection."""

    def __init__(self, connection: Connection, pid: int | None = None) -> None:
        """`pid` is that of the worker's process, where it has one to itself."""
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
            with suppress(ProcessLookupError):
                os.kill(self.pid, SIGKILL)
        self.hang_up()


class DriverConnection:
    """The worker's end of a connection, for messages of several threads."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._sending = Lock()

    def send(self, message: bytes) -> None:
        """Send a message; OSError once the driver is gone."""
        with self._sending:
            self.connection.send_bytes(message)


async def serve_connection(worker: Worker, driver: DriverConnection) -> None:
    """Serve the calls of the driver until it hangs up or is gone."""

    async def send(message: bytes) -> None:
        await asyncio.to_thread(driver.send, message)

    try:
        await serve(worker, _messages(driver.connection), send)
    finally:
        hang_up(driver.connection)


def hang_up(connection: Connection) -> None:
    """End a connection: both sides read no more, threads that are waiting for a message included."""
    # closing it would not wake up a thread that is reading
    with suppress(OSError), socket(fileno=os.dup(connection.fileno())) as line:
        line.shutdown(SHUT_RDWR)


def _messages(connection: Connection) -> asyncio.Queue[bytes | None]:
    """A queue that a thread fills with the messages of a connection; None is its end."""
    queue, loop = asyncio.Queue[bytes | None](), asyncio.get_running_loop()

    def receive() -> None:
        # the loop is closed once `serve` has ended
        with suppress(RuntimeError):
            with suppress(EOFError, OSError):
                while True:
                    loop.call_soon_threadsafe(queue.put_nowait, connection.recv_bytes())
            loop.call_soon_threadsafe(queue.put_nowait, None)

    # a daemon: the process may end while it waits
    Thread(target=receive, name="calls of the driver", daemon=True).start()
    return queue
