"""Calls the user's reward functions in child processes; one that exceeds its time limit is killed and replaced.

A thread that holds the interpreter lock blocks its whole process and cannot be killed. Tasks are sent as pickles, since
rows hold arrays and pictures; scores come back as JSON, so that nothing from a child process is unpickled.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import socket
import struct
from asyncio import IncompleteReadError, StreamReader, StreamWriter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from pydantic import TypeAdapter

from fovea_gym.errors import ConfigError, first_line, named
from fovea_gym.graders.base import NoScoreError
from fovea_gym.graders.grading import CallLimits
from fovea_gym.processes.child import ChildProcess
from fovea_gym.types import Score, Task, Turn
from fovea_gym.utils.launch import module_command, with_this_fovea, without_torchrun

HEADER = struct.Struct("!Q")
"""Length in bytes of the message that follows it, in both directions."""
MAX_ANSWER_BYTES = 2**24
START_SECONDS = 300.0
"""Time limit for the start of a process, which may load a model."""
END_SECONDS = 5.0
"""Time limit for the exit of a process that has closed its socket."""
POLL_SECONDS = 0.01
_SCORES = TypeAdapter(Score)


class RewardProcesses:
    """A grader that makes each call in a child process; a process that has answered is reused for a later call."""

    def __init__(self, module: str, settings: Mapping[str, Any], limits: CallLimits) -> None:
        """`module` is run with the file descriptor of a socket, over which it receives `settings`.

        Of `limits`, only the time limit and the names for messages are used.
        """
        self._command = module_command(module)
        self._settings = json.dumps(settings).encode()
        self._name = limits.name
        self._limits = limits
        self._idle: list[RewardProcess] = []

    async def score(self, task: Task, turns: Sequence[Turn]) -> Score:
        """Score an episode in a child process, whose start does not count towards the time limit.

        NoScoreError if the call fails or is late; ConfigError if the reward cannot be imported.
        """
        why = "cannot be called in a process, since the task holds an object that cannot be pickled"
        with named(lambda error: NoScoreError(f"{why} ({first_line(error)})")):
            asked = (task, turns[-1].text, turns[-1].num_tokens)
            message = pickle.dumps(asked, protocol=pickle.HIGHEST_PROTOCOL)
        try:
            try:
                answer = await self._ask(await self._waiting(), message)
            except UnreadError:
                answer = await self._ask(await self._start(), message)
        except EOFError as error:
            raise NoScoreError(f"ended its process ({error})") from error
        if "failed" in answer:
            raise NoScoreError(answer["failed"])
        return _SCORES.validate_python(answer)

    async def _ask(self, process: RewardProcess, message: bytes) -> dict[str, Any]:
        """Return the answer of a process and keep it for later calls; EOFError says how a process has ended."""
        try:
            async with asyncio.timeout(self._limits.timeout_seconds):
                answer = await process.ask(message)
        except TimeoutError as error:
            await process.kill()
            limit = f"{self._limits.time_setting}={self._limits.timeout_seconds or 0:g}"
            raise NoScoreError(f"took more than {limit}, and its process was killed") from error
        except EOFError as error:
            raise type(error)(await process.ended()) from error
        except BaseException:
            await process.kill()
            raise
        self._idle.append(process)
        return answer

    async def aclose(self) -> None:
        """Kill the idle processes; a process in the middle of a call is killed when that call is cancelled."""
        while self._idle:
            await self._idle.pop().kill()

    async def _waiting(self) -> RewardProcess:
        while self._idle:
            process = self._idle.pop()
            if process.is_running:
                return process
            await process.kill()
        return await self._start()

    async def _start(self) -> RewardProcess:
        process = RewardProcess(self._command)
        try:
            async with asyncio.timeout(START_SECONDS):
                problem = (await process.ask(self._settings)).get("problem")
        except EOFError:
            problem = f"reward={self._name} cannot be imported: it ended its process ({await process.ended()}); fix it"
        except TimeoutError:
            problem = f"reward={self._name} was not imported within {START_SECONDS:g} s; make its import faster"
        except BaseException:
            await process.kill()
            raise
        if problem is not None:
            await process.kill()
            raise ConfigError(problem)
        return process


class UnreadError(EOFError):
    """The process ended before it read the message, so the message is not the cause."""


class RewardProcess:
    """One child process, and the trainer's end of the socket to it."""

    def __init__(self, command: Sequence[str]) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            environment = with_this_fovea(without_torchrun(os.environ))
            self._process = ChildProcess([*command, str(theirs.fileno())], environment, pipe=theirs.fileno())
        self._streams: tuple[StreamReader, StreamWriter] | None = None

    @property
    def is_running(self) -> bool:
        return self._process.exit_code is None

    async def ask(self, message: bytes) -> dict[str, Any]:
        """Send a message and return the answer.

        EOFError if the process has ended; UnreadError if it ended before it read the message.
        """
        if self._streams is None:
            self._streams = await asyncio.open_connection(sock=self._socket)
        reader, writer = self._streams
        try:
            writer.write(HEADER.pack(len(message)) + message)
            await writer.drain()
            (size,) = HEADER.unpack(await reader.readexactly(HEADER.size))
            if size > MAX_ANSWER_BYTES:
                raise NoScoreError(f"returned a score of {size / 2**20:.0f} MiB; return fewer or smaller parts")
            answer: dict[str, Any] = json.loads(await reader.readexactly(size))
        except ConnectionError as error:
            # a broken pipe, or a reset: Linux resets a socket that is closed with unread bytes
            raise UnreadError from error
        except IncompleteReadError as error:
            raise EOFError from error
        return answer

    async def ended(self) -> str:
        """Say how a process that has closed its socket ended; it is killed if it still runs after END_SECONDS."""
        # the kernel closes the socket first, and may then write a core file or free much memory
        with suppress(TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                await self._exit_code()
        return await self.kill()

    async def kill(self) -> str:
        """Kill the process, unless it has already ended, and everything that it started; returns how it ended."""
        self._process.kill()
        if self._streams is None:
            self._socket.close()
        else:
            self._streams[1].close()
        code = await self._exit_code()
        return f"exit code {code}" if code >= 0 else f"killed by signal {-code}, {signal.strsignal(-code)}"

    async def _exit_code(self) -> int:
        """Wait for the exit code, negative for a signal, without blocking the event loop."""
        while (code := self._process.exit_code) is None:
            await asyncio.sleep(POLL_SECONDS)
        return code


def score_to_json(score: Score) -> dict[str, Any]:
    """A score as the JSON answer of a process; without `turns`, since a process is given only the last turn."""
    answer: dict[str, Any] = _SCORES.dump_python(score, mode="json", exclude={"turns"})
    return answer
