"""A worker process at the other end of a connection: the driver's handle, and the loop that serves its calls."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection
from socket import SHUT_RDWR, socket
from threading import Thread
from typing import Any, TypeAlias

from fovea.cluster.messages import Inbox, Outbox
from fovea.cluster.workers import Call, Worker
from fovea.errors import ClusterError, FoveaError

Numbered: TypeAlias = tuple[int, Call]
"""A call and its number, by which its answer names it."""


class ConnectedWorker:
    """A `WorkerHandle` over a connection."""

    def __init__(self, connection: Connection, rank: int) -> None:
        self._connection = connection
        self._rank = rank
        self._outbox = Outbox()
        self._sending = asyncio.Lock()
        self._queued: list[Numbered] = []
        self._flush: asyncio.Task[None] | None = None
        self._num_calls = 0
        self._running: dict[int, Future[Any]] = {}
        self._receiver = Thread(target=self._receive, name=f"answers of rank {rank}", daemon=True)
        self._receiver.start()

    @property
    def image_bytes(self) -> int:
        return self._outbox.image_bytes

    def forget_images(self) -> None:
        self._outbox.forget()

    async def start(self, call: Call) -> Awaitable[Any]:
        """Send a call, in one message with all others of this turn of the event loop."""
        # one message: an engine that got requests one by one would prefill the first of them alone
        number, answer = self._num_calls, Future[Any]()
        # a caller that is cancelled waits no longer, but its answer still arrives
        answer.set_running_or_notify_cancel()
        self._num_calls += 1
        self._running[number] = answer
        self._queued.append((number, call))
        if self._flush is None:
            self._flush = asyncio.create_task(self._send_queued())
        await asyncio.shield(self._flush)
        return asyncio.wrap_future(answer)

    async def close(self) -> None:
        """Hang up, upon which the worker ends."""
        hang_up(self._connection)
        await asyncio.to_thread(self._receiver.join)

    async def _send_queued(self) -> None:
        await asyncio.sleep(0)  # lets the other calls of this turn queue up
        calls, self._queued, self._flush = self._queued, [], None
        async with self._sending:
            message = self._outbox.pack(calls)
            try:
                await asyncio.to_thread(self._connection.send_bytes, message)
            except OSError as error:
                raise self._gone() from error

    def _receive(self) -> None:
        """Hand answers to their callers until the connection ends; then fail those that still wait."""
        inbox = Inbox()
        while True:
            try:
                number, result, error = inbox.unpack(self._connection.recv_bytes())
            except (EOFError, OSError):
                break
            answer = self._running.pop(number)
            if error is None:
                answer.set_result(result)
            else:
                answer.set_exception(error)
        # a copy: the loop's thread may be adding a call, whose sending fails by itself
        for answer in list(self._running.values()):
            answer.set_exception(self._gone())

    def _gone(self) -> ClusterError:
        return ClusterError(
            f"the worker process of rank {self._rank} has ended; its own message, if it had time for one, is above; "
            "start again to go on from the last checkpoint"
        )


async def serve(worker: Worker, connection: Connection) -> None:
    """Make the calls that arrive until the driver hangs up or is gone, then close the worker's engine.

    Errors of an engine go back to their caller. An error in a collective call ends this process as well, since the
    other workers may be waiting in that call.
    """
    inbox, outbox, sending = Inbox(), Outbox(), asyncio.Lock()

    async def answer(number: int, call: Call) -> None:
        task = asyncio.ensure_future(call.run(worker))
        await asyncio.wait([task])
        error = task.exception()
        # collective calls have the same result in the driver's own worker
        result = task.result() if error is None and call.service == "engine" else None
        async with sending:
            await asyncio.to_thread(connection.send_bytes, outbox.pack((number, result, _picklable(error))))
        if error is not None and call.service != "engine":
            raise error

    messages = _messages(connection)
    try:
        async with asyncio.TaskGroup() as tasks:
            while (message := await messages.get()) is not None:
                for number, call in inbox.unpack(message):
                    tasks.create_task(answer(number, call))
    finally:
        hang_up(connection)
        await worker.engine.close()


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


def _picklable(error: BaseException | None) -> BaseException | None:
    """Fovea's own errors as they are, any other as its text: it may hold what cannot be sent."""
    return error if error is None or isinstance(error, FoveaError) else ClusterError(f"{type(error).__name__}: {error}")
