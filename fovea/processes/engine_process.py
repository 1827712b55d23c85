"""The trainer's end of the pipe to a process that holds an engine (`processes.engine_host` is the other one)."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence, Set
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir, mkstemp
from threading import Lock, Thread
from time import monotonic, sleep
from types import MappingProxyType
from typing import Any

from fovea.errors import EngineError, FoveaError, LostEngineError, first_line
from fovea.utils.launch import without_torchrun

CLOSE_SECONDS = 20.0
POLL_SECONDS = 0.5
GONE_SECONDS = 0.01
PAUSED_SECONDS = 3 * POLL_SECONDS
"""Longest time between two looks at an engine where this process itself was not stopped or starved."""
EXIT_SECONDS = 2.0
"""Longest wait for the exit code of a process that has closed its end of the pipe."""
LOG_FILE = "engine.log"
KEPT_LOGS = "FOVEA_KEPT_LOGS"
"""Environment variable with the folder of logs that outlive an engine, in a process whose temporary files do not."""


class NotStartedError(LostEngineError):
    """A process that has ended by itself before its engine was ready, as it would again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long an engine may be silent while it has something to do."""

    start_seconds: float
    """While it starts."""
    timeout_seconds: float
    """Afterwards."""


def groups_of(pid: int) -> set[int]:
    """Ids of the process groups of a running process and of all below it, of which an engine may have its own."""
    import psutil  # noqa: PLC0415  as below

    groups = {os.getpgid(pid)}
    with suppress(psutil.NoSuchProcess):
        for process in psutil.Process(pid).children(recursive=True):
            with suppress(ProcessLookupError):
                groups.add(os.getpgid(process.pid))
    return groups


def wait_until_gone(groups: Set[int], seconds: float) -> None:
    """Wait until no process of some process groups runs, for some seconds at most.

    A killed process holds its memory for a moment; only its parent could wait for it otherwise. One that nobody
    reaps, as in a container without an init, has given back everything.
    """
    import psutil  # noqa: PLC0415  where an engine has its own processes; the core does without

    end = monotonic() + seconds
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            while os.getpgid(process.pid) in groups and process.status() != psutil.STATUS_ZOMBIE and monotonic() < end:
                sleep(GONE_SECONDS)


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
        """Start it and wait until it has loaded the model; LostEngineError with the end of its log if it does not.

        `name` is for messages, `command` gets the arguments of `engine_host.begin` as its last ones, and `environment`
        is added to this process's own variables, of which it removes those that are None.
        """
        self._name = name
        self.limits = limits
        # SGLang leaves the files of its sockets where temporary files are made
        self._folder = TemporaryDirectory(prefix="fovea-engine-", ignore_cleanup_errors=True)
        self._connection, theirs = multiprocessing.Pipe()
        self._numbers = count(1)
        self._waiting: dict[int, Future[Any]] = {}
        self._sending = Lock()
        self._is_closing = False
        self._is_started = False
        self._is_hung = False
        self._active = monotonic()
        """When a call was sent, an answer came, or this process went on after it was stopped, last."""
        ready = self._wait_for(0)
        with theirs:
            self._process = self._popen(command, theirs.fileno(), environment)
        self._reader = Thread(target=self._read, name=f"answers of {name}", daemon=True)
        self._reader.start()
        try:
            self._send(Start(arguments=arguments, authkey=bytes(multiprocessing.current_process().authkey)))
            ready.result()
            self._is_started = True
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Id of the process, and of the group that all processes of the engine are in."""
        return self._process.pid

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """The coming result of a method of what the process serves.

        The method's error if it fails; LostEngineError if the process ends, or hangs.
        """
        number = next(self._numbers)
        result = self._wait_for(number)
        self._send(Call(number=number, method=method, arguments=arguments))
        return result

    def run(self, method: str, *arguments: Any) -> Any:
        """Call a method, and wait for its result."""
        return self.call(method, *arguments).result()

    def check(self) -> None:
        """Raise LostEngineError if the process has ended."""
        if self._process.poll() is not None:
            raise self._lost()

    def close(self) -> None:
        """End all processes of the engine, and wait until they are gone."""
        if self._is_closing:
            return
        self._is_closing = True
        # one that is still being made would not listen
        if self._is_started and self._process.poll() is None:
            with suppress(EngineError, LostEngineError, TimeoutError):
                self.call("shut_down").result(CLOSE_SECONDS)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(CLOSE_SECONDS)
        # what is left of the group, also after a host that was killed
        groups = self._kill()
        self._process.wait()
        wait_until_gone(groups, CLOSE_SECONDS)
        # it sees the end of the pipe, and reads the log for those who still wait
        self._reader.join(CLOSE_SECONDS)
        self._connection.close()
        self._folder.cleanup()

    @property
    def folder(self) -> Path:
        """Folder of the log and of all temporary files of the engine, until it is closed."""
        return Path(self._folder.name)

    @property
    def _log(self) -> Path:
        return self.folder / LOG_FILE

    def _popen(
        self, command: Sequence[str], pipe: int, environment: Mapping[str, str | None]
    ) -> subprocess.Popen[bytes]:
        kept_logs = os.environ.get(KEPT_LOGS, gettempdir())
        changes = {**environment, KEPT_LOGS: kept_logs, "TMPDIR": self._folder.name}
        variables = {name: value for name, value in (os.environ | changes).items() if value is not None}
        with self._log.open("wb") as log:
            return subprocess.Popen(
                [*command, str(pipe), self._folder.name, str(os.getpid())],
                env=without_torchrun(variables),
                pass_fds=[pipe],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Ctrl-C is for the trainer, which then closes the engine
                start_new_session=True,
            )

    def _wait_for(self, number: int) -> Future[Any]:
        result: Future[Any] = Future()
        # whoever waits may be cancelled; the call goes on
        result.set_running_or_notify_cancel()
        self._waiting[number] = result
        return result

    def _kill(self) -> set[int]:
        """Kill all processes of the engine; ids of their groups."""
        # once it has been waited for, its id may be that of another process
        groups = groups_of(self.pid) if self._process.poll() is None else {self.pid}
        for group in groups:
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        return groups

    def _send(self, message: Start | Call) -> None:
        self._active = monotonic()
        try:
            with self._sending:
                self._connection.send(message)
        except OSError:
            # the reader has seen the same, or will
            self._fail(self._lost())

    def _read(self) -> None:
        while True:
            try:
                answer = self._next_answer()
            except (EOFError, OSError):
                # first: a call that comes later must not be sent to where nobody reads
                with self._sending:
                    self._connection.close()
                self._fail(self._lost())
                return
            except Exception as error:
                # its number is in what cannot be read
                self._fail(EngineError(f"an answer of {self._name} cannot be read: {first_line(error)}"))
                continue
            self._active = monotonic()
            result = self._waiting.pop(answer.number, None)
            if result is None:
                # a call that could not be sent has failed all others
                continue
            if answer.error is None:
                result.set_result(answer.value)
            else:
                result.set_exception(answer.error)

    def _next_answer(self) -> Answer:
        """Wait for an answer; EOFError where none will come."""
        looked = monotonic()
        while not self._connection.poll(POLL_SECONDS):
            if self._process.poll() is not None and not self._connection.poll():
                # a child of it, which it had forked, holds the pipe open
                self._kill()
                raise EOFError
            now = monotonic()
            if now - looked > PAUSED_SECONDS:
                # as a container that is paused, with the engine in it: its silence meanwhile says nothing
                self._active = now
            looked = now
            self._kill_if_hung()
        answer: Answer = self._connection.recv()
        return answer

    def _kill_if_hung(self) -> None:
        """End an engine that has something to do and has not answered for too long, whatever it waits for."""
        _, seconds = self._limit()
        if self._waiting and monotonic() - self._active > seconds:
            self._is_hung = True
            self._kill()

    def _fail(self, error: EngineError | LostEngineError) -> None:
        """Raise an error wherever a result is waited for."""
        # two threads may come here at once
        with suppress(KeyError):
            while True:
                self._waiting.popitem()[1].set_exception(error)

    def _lost(self) -> LostEngineError:
        kind = NotStartedError if self._has_given_up() else LostEngineError
        return kind(f"{self._name} {self._end()}: {self._last_words()}{self._kept_log()}")

    def _has_given_up(self) -> bool:
        """True if it has ended by itself, and was not killed, before the engine was ready."""
        if self._is_started:
            return False
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(EXIT_SECONDS) >= 0
        return False

    def _end(self) -> str:
        """How it ended, in words."""
        if not self._is_hung:
            return "has ended"
        name, seconds = self._limit()
        return (
            f"gave no answer for rollout.engine.{name}={seconds:g} and was ended; raise that where it needs longer. "
            "Its last words"
        )

    def _limit(self) -> tuple[str, float]:
        """The name of the present limit, and its seconds."""
        if self._is_started:
            return "timeout_seconds", self.limits.timeout_seconds
        return "start_seconds", self.limits.start_seconds

    def _kept_log(self) -> str:
        """The words that name a copy of the log; "" where somebody has closed the engine, or waits for nothing."""
        if self._is_closing or not self._waiting:
            return ""
        descriptor, name = mkstemp(prefix="fovea-engine-", suffix=".log", dir=os.environ.get(KEPT_LOGS))
        os.close(descriptor)
        with suppress(OSError):
            shutil.copyfile(self._log, name)
        return f"; its log is {name}"

    def _last_words(self) -> str:
        """The last line of the log that names an exception, else its last line."""
        try:
            log = self._log.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return "it was closed"
        lines = [line.strip() for line in log.splitlines()]
        named = [line for line in lines if line.split(":")[0].endswith(("Error", "Exception"))]
        return (named or [line for line in lines if line] or ["without a word"])[-1][:300]


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The first message: what the engine is made with."""

    arguments: Any
    """The process knows what they are."""
    authkey: bytes
    """Key by which the engine's processes may fetch tensors in shared memory from the trainer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call of a method of what the process serves."""

    number: int
    """Number of the call, which its answer has too."""
    method: str
    arguments: Sequence[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The end of a call; number 0 is that of `Start`."""

    number: int
    value: Any = None
    error: FoveaError | None = None
    """The exception that ended the call."""
