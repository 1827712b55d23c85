"""The other end of `processes.engine_process`: in the process that holds an engine, the calls of the trainer."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import shutil
import signal
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from threading import Thread
from typing import Any

from fovea.errors import EngineError, FoveaError, first_line, named
from fovea.processes.engine_process import Answer, Call, Start

PARENT_CHECK_SECONDS = 0.5
LAST_CALL = "shut_down"


def begin(arguments: Sequence[str]) -> tuple[Connection, Any]:
    """The pipe to the trainer, and what it has sent first.

    `arguments` end this process's command line: the pipe's descriptor, a folder for this process, the trainer's pid.
    From here on, all processes of this one's group end with the trainer, however it ends.
    """
    descriptor, folder, trainer = int(arguments[0]), arguments[1], int(arguments[2])
    Thread(target=_end_with, args=(trainer, folder), daemon=True).start()
    os.set_inheritable(descriptor, False)
    connection: Connection = Connection(descriptor)
    try:
        start: Start = connection.recv()
    except (EOFError, OSError):
        _end(folder)
        raise
    multiprocessing.current_process().authkey = start.authkey
    return connection, start.arguments


class Calls:
    """Makes the calls that come through a pipe, of the public methods of one object, which are coroutines."""

    def __init__(self, target: Any, connection: Connection, folder: str, prefix: str = "") -> None:
        """`folder` is that of `begin`'s arguments; `prefix` begins the messages of errors that are not Fovea's own."""
        self._target = target
        self._connection = connection
        self._folder = folder
        self._prefix = prefix
        self._running: dict[int, asyncio.Task[None]] = {}
        self._ended = asyncio.Event()

    async def serve(self) -> None:
        """Tell the trainer that all is ready; make calls until it calls `shut_down`.

        If it hangs up without that, it is gone, and all processes of this one's group end.
        """
        Thread(target=self._read, args=(asyncio.get_running_loop(),), name="calls", daemon=True).start()
        self._connection.send(Answer(number=0))
        await self._ended.wait()

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        """Take calls, on a thread: a loop that watched the pipe would make its reads fail in the middle of a call."""
        while True:
            try:
                call = self._connection.recv()
            except (EOFError, OSError):
                # here too, since the thread that looks for the trainer would end with this process
                _end(self._folder)
                return
            except Exception:
                # its number is in what cannot be read: whoever waits for an answer learns it by this process's end
                traceback.print_exc()
                _kill_group()
                return
            loop.call_soon_threadsafe(self._begin, call)

    def _begin(self, call: Call) -> None:
        self._running[call.number] = asyncio.get_running_loop().create_task(self._answer(call))

    async def _answer(self, call: Call) -> None:
        try:
            with named(lambda error: EngineError(f"{self._prefix}{str(error) or first_line(error)}")):
                value = await getattr(self._target, call.method)(*call.arguments)
            answer = self._written(call, value)
        except FoveaError as error:  # it is the trainer's, which raises it there
            answer = ForkingPickler.dumps(Answer(number=call.number, error=error))
        del self._running[call.number]
        self._connection.send_bytes(answer)
        if call.method == LAST_CALL:
            self._ended.set()

    def _written(self, call: Call, value: Any) -> memoryview:
        """The answer as the trainer reads it; EngineError for a value that cannot be sent."""
        what = f"{self._prefix}the result of {call.method} cannot be sent"
        with named(lambda error: EngineError(f"{what}: {first_line(error)}")):
            return ForkingPickler.dumps(Answer(number=call.number, value=value))


def _end_with(trainer: int, folder: str) -> None:
    """Wait for the end of the trainer, however it goes and whenever it went, and end this process's group."""
    while os.getppid() == trainer:
        time.sleep(PARENT_CHECK_SECONDS)
    _end(folder)


def _end(folder: str) -> None:
    """Kill this process's group; its folder goes too."""
    shutil.rmtree(folder, ignore_errors=True)
    _kill_group()


def _kill_group() -> None:
    # the processes of the engine are in this one's group, in which the trainer is not
    os.killpg(os.getpgrp(), signal.SIGKILL)
