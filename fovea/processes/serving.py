"""The serving end of a connection, which makes the calls that arrive: in a worker, or in the process of an engine."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from socket import SHUT_RDWR, socket
from threading import Lock, Thread
from typing import Any, Protocol

from fovea.errors import EngineError
from fovea.processes.calls import Answer, Call, NumberedCalls
from fovea.processes.messages import Packing
from fovea_gym.errors import FoveaError, first_line


class CallTarget(Protocol):
    """An object whose methods are called from another process."""

    async def close(self) -> None:
        """Close the object; the process keeps running."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How calls of an object are made, and how their errors are passed on."""

    make: Callable[[Call], Awaitable[Any]]
    error_of: Callable[[BaseException], BaseException]
    """Makes the error that the caller gets from an error that is not Fovea's, which may not be picklable."""
    is_collective: Callable[[Call], bool] = lambda _: False
    """True for a call in which other processes may wait for this one: its error also ends this process."""


async def serve(
    target: CallTarget, messages: asyncio.Queue[bytes | None], send: Callable[[bytes], Awaitable[None]], rules: Rules
) -> None:
    """Make the calls that arrive until None arrives, then close the object; `send` sends a message to the caller.

    Errors are sent to the caller. Calls that still run when None arrives are cancelled, since the caller has left.
    """
    packing, sending, running = Packing(), asyncio.Lock(), set[asyncio.Task[Any]]()

    async def answer(number: int, call: Call, task: asyncio.Task[Any]) -> None:
        await asyncio.wait([task])
        if task.cancelled():
            return
        # if no caller reads the answer any more, None arrives next
        with suppress(OSError):
            async with sending:
                await send(_packed(packing, rules, number, call, task))
        if rules.is_collective(call):
            task.result()

    try:
        async with asyncio.TaskGroup() as tasks:
            while (message := await messages.get()) is not None:
                calls: NumberedCalls = packing.unpack(message)
                for number, call in calls:
                    task = asyncio.ensure_future(rules.make(call))
                    if not rules.is_collective(call):
                        running.add(task)
                        task.add_done_callback(running.discard)
                    tasks.create_task(answer(number, call, task))
            for each in running:
                each.cancel()
    except ExceptionGroup as group:
        # the first of the calls that failed: its error decides the message and exit code of this process
        raise group.exceptions[0] from None
    finally:
        await target.close()


def _packed(packing: Packing, rules: Rules, number: int, call: Call, task: asyncio.Task[Any]) -> bytes:
    """The answer to a call that has ended."""
    error = task.exception()
    if error is None:
        try:
            return packing.pack(Answer(number=number, value=task.result()))
        except Exception as unsent:
            error = TypeError(f"the result of {call.method} cannot be sent: {first_line(unsent)}")
    return packing.pack(Answer(number=number, error=error if isinstance(error, FoveaError) else rules.error_of(error)))


class CallerConnection:
    """The serving end of a connection, on which several threads may send."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._sending = Lock()

    def send(self, message: bytes) -> None:
        """Send a message; OSError once the caller is gone."""
        with self._sending:
            self.connection.send_bytes(message)


async def serve_connection(target: CallTarget, caller: CallerConnection, rules: Rules) -> None:
    """Serve the calls of the other end until it closes the connection or is gone."""

    async def send(message: bytes) -> None:
        await asyncio.to_thread(caller.send, message)

    try:
        await serve(target, _messages(caller.connection), send, rules)
    finally:
        hang_up(caller.connection)


def hang_up(connection: Connection) -> None:
    """Shut a connection down, which ends reads at both ends, also in threads that are waiting for a message."""
    # closing the connection would not wake up a thread that is reading
    with suppress(OSError), socket(fileno=os.dup(connection.fileno())) as line:
        line.shutdown(SHUT_RDWR)


def _messages(connection: Connection) -> asyncio.Queue[bytes | None]:
    """A queue that a thread fills with the messages of a connection; None marks the end."""
    # in a thread, since an event loop that watches the connection would make its other reads fail during a call
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


def begin(descriptor: int) -> tuple[Connection, Any]:
    """Open the pipe of `EngineProcess`; returns it with the first message: the arguments for making the engine."""
    os.set_inheritable(descriptor, False)
    connection: Connection = Connection(descriptor)
    (_, start), *_ = Packing().unpack(connection.recv_bytes())
    # with the key, this process may fetch tensors in shared memory from its parent
    arguments, multiprocessing.current_process().authkey = start.arguments
    return connection, arguments


def refuse(connection: Connection, error: FoveaError) -> None:
    """Answer the first message with an error."""
    connection.send_bytes(Packing().pack(Answer(number=0, error=error)))


async def serve_parent(target: CallTarget, connection: Connection, prefix: str = "") -> None:
    """Answer the first message, and serve the calls of the other end until it closes the pipe or is gone.

    `prefix` begins the messages of errors that are not Fovea's.
    """
    connection.send_bytes(Packing().pack(Answer(number=0)))
    rules = Rules(
        make=lambda call: call.make(target),
        error_of=lambda error: EngineError(f"{prefix}{str(error) or first_line(error)}"),
    )
    await serve_connection(target, CallerConnection(connection), rules)
