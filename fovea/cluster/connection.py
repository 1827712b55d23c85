"""The line between a driver and a worker on one machine: a connection of multiprocessing."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from multiprocessing.connection import Connection
from signal import SIGKILL
from socket import SHUT_RDWR, socket
from threading import Lock, Thread

from fovea.cluster.remote import serve
from fovea.cluster.workers import Worker


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
