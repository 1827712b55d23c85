"""The trainer's end of the pipe to a process that holds an engine (`processes.serving` is the other end)."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from time import monotonic
from types import MappingProxyType
from typing import Any

from fovea.errors import EngineError, LostEngineError
from fovea.processes.calls import Call, RemoteCalls
from fovea.processes.heartbeat import Silence
from fovea.processes.serving import hang_up
from fovea_gym.errors import first_line
from fovea_gym.processes.child import KEPT_LOGS, ChildProcess, LogFile, kept_logs
from fovea_gym.processes.ending import CLOSE_SECONDS
from fovea_gym.utils.launch import with_this_fovea, without_torchrun

LOOK_SECONDS = 0.5
EXIT_SECONDS = 2.0
"""Longest wait for the exit code of a process that closed its end of the pipe."""
LOG_FILE = "engine.log"


class NotStartedError(LostEngineError):
    """The process exited before its engine was ready, without being killed; it would do so again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Longest time that an engine may be silent while a call waits for its answer."""

    start_seconds: float
    """Limit while the engine starts."""
    timeout_seconds: float
    """Limit after the engine has started."""


class EngineProcess:
    """An engine in one or several separate processes."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        arguments: Any,
        limits: Limits,
        environment: Mapping[str, str | None] = MappingProxyType({}),
    ) -> None:
        """Start the process and wait until it has loaded the model; LostEngineError with the end of its log if not.

        `name` is for messages. `command` gets the descriptor of the pipe (`serving.begin`) as its last argument.
        `environment` is merged into this process's environment variables; a value of None removes a variable.
        """
        self._name = name
        self.limits = limits
        # SGLang leaves its socket files in the folder for temporary files
        self._folder = TemporaryDirectory(prefix="fovea-engine-", ignore_cleanup_errors=True)
        self._log = LogFile(self.folder / LOG_FILE)
        self._connection, theirs = multiprocessing.Pipe()
        self._sending = Lock()
        self._is_closing = False
        self._is_started = False
        self._is_hung = False
        self._silence = Silence(LOOK_SECONDS, monotonic())
        """Time since a call was sent, an answer arrived, or this process resumed after being stopped."""
        with theirs:
            self._process = self._start(command, theirs.fileno(), environment)
        self._calls = RemoteCalls(
            self._next_message,
            self._pipe_ended,
            unreadable=lambda error: EngineError(f"an answer of {name} cannot be read: {first_line(error)}"),
        )
        self._calls.reader.start()
        try:
            # with the key, the engine's processes may fetch tensors in shared memory from this process
            self.run("start", arguments, bytes(multiprocessing.current_process().authkey))
            self._is_started = True
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Id of the process, and of the process group of all processes of the engine."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code of the process, negative for a signal; None while it runs."""
        return self._process.exit_code

    @property
    def folder(self) -> Path:
        """Folder of the log and of the engine's temporary files, until the engine is closed."""
        return Path(self._folder.name)

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """Call a method of the object that the process serves; returns a future of its result.

        The future raises the method's error if it fails, and LostEngineError if the process ends or hangs.
        """
        self._silence.heard(monotonic())
        with self._sending:
            number, result = self._calls.add()
            message = self._calls.packing.pack([(number, Call(method=method, arguments=arguments))])
            # each request sends its images, since an evaluation has no weight sync after which to free them
            self._calls.packing.forget()
            try:
                self._connection.send_bytes(message)
                return result
            except OSError:
                pass
        # the reader thread has noticed the end of the pipe too, or will
        self._calls.fail(self._lost())
        return result

    def run(self, method: str, *arguments: Any) -> Any:
        """Call a method, and wait for its result."""
        return self.call(method, *arguments).result()

    def check(self) -> None:
        """Raise LostEngineError if the process has ended."""
        if self.exit_code is not None:
            raise self._lost()

    def close(self) -> None:
        """End all processes of the engine, and wait until they are gone."""
        if self._is_closing:
            return
        self._is_closing = True
        groups = self._process.groups()
        # an engine that is still being made would not listen
        if self._is_started and self.exit_code is None:
            hang_up(self._connection)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(CLOSE_SECONDS)
        # end the rest of the process groups, also if the main process was killed
        self._process.close(groups)
        # the reader thread sees the end of the pipe, and reads the log for callers that still wait
        self._calls.reader.join(CLOSE_SECONDS)
        self._connection.close()
        self._folder.cleanup()

    def _start(self, command: Sequence[str], pipe: int, changes: Mapping[str, str | None]) -> ChildProcess:
        own = {KEPT_LOGS: kept_logs(), "TMPDIR": self._folder.name}
        variables = {name: value for name, value in {**os.environ, **changes, **own}.items() if value is not None}
        return ChildProcess(
            [*command, str(pipe)],
            with_this_fovea(without_torchrun(variables)),
            pipe=pipe,
            log=self._log,
            folder=self._folder.name,
        )

    def _pipe_ended(self, _: Exception) -> LostEngineError:
        # close first, so that a later call fails at once
        with self._sending:
            self._connection.close()
        # the process may print its last lines after it has closed the pipe
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_SECONDS)
        return self._lost()

    def _next_message(self) -> bytes:
        """Wait for an answer; EOFError if none can arrive any more."""
        while not self._connection.poll(LOOK_SECONDS):
            if self.exit_code is not None and not self._connection.poll():
                # a forked child of the process still holds the pipe open
                self._process.kill()
                raise EOFError
            self._kill_if_hung()
        message = self._connection.recv_bytes()
        self._silence.heard(monotonic())
        return message

    def _kill_if_hung(self) -> None:
        """Kill an engine that has not answered a pending call for too long, whatever it waits for."""
        _, seconds = self._limit()
        # read first: a call that begins after the silence was measured has not waited that long
        is_busy = bool(self._calls)
        if self._silence.seconds(monotonic()) > seconds and is_busy:
            self._is_hung = True
            self._process.kill()

    def _lost(self) -> LostEngineError:
        kind = NotStartedError if self._has_given_up() else LostEngineError
        return kind(f"{self._name} {self._end()}: {self._log.last_words()}{self._kept_log()}")

    def _has_given_up(self) -> bool:
        """True if the process exited, and was not killed, before the engine was ready."""
        if self._is_started:
            return False
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(EXIT_SECONDS) >= 0
        return False

    def _end(self) -> str:
        """How the process ended, for an error message."""
        if not self._is_hung:
            return "has ended"
        name, seconds = self._limit()
        return (
            f"gave no answer for rollout.engine.{name}={seconds:g} and was ended; raise that setting if it needs more "
            "time. Its last output"
        )

    def _limit(self) -> tuple[str, float]:
        """The name of the limit in effect, and its seconds."""
        if self._is_started:
            return "timeout_seconds", self.limits.timeout_seconds
        return "start_seconds", self.limits.start_seconds

    def _kept_log(self) -> str:
        """Part of the message that names a copy of the log; "" if the engine was closed, or no call waits."""
        if self._is_closing or not self._calls:
            return ""
        return f"; its log is {self._log.keep()}"
