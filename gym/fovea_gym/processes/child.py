"""A child process that is ended together with this process, and with all processes that the child has started."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence, Set
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir, mkstemp

from fovea_gym.processes import ending

KEPT_LOGS = "FOVEA_KEPT_LOGS"
"""Environment variable with the folder for logs that outlive a child, for processes whose temporary files do not."""


class ChildProcess:
    """A process in a separate session: Ctrl-C reaches only this process, which then ends the child.

    A second small process, the watcher, ends the child and all its descendants when this process is killed.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        pipe: int | None = None,
        log: LogFile | None = None,
        folder: str = "",
        grace_seconds: float = 0.0,
    ) -> None:
        """`pipe` is a descriptor that the child inherits; its output goes to `log`, or to the output of this process.

        When this process is killed, the child gets SIGTERM and, `grace_seconds` later, SIGKILL; then `folder` is
        deleted.
        """
        with nullcontext() if log is None else log.path.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                env=environment,
                pass_fds=[] if pipe is None else [pipe],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=None if output is None else subprocess.STDOUT,
                start_new_session=True,
            )
        watched = [str(os.getpid()), str(self.pid), str(grace_seconds), folder]
        try:
            self._watcher = subprocess.Popen(
                [sys.executable, "-I", "-S", ending.__file__, *watched], stdin=subprocess.PIPE, start_new_session=True
            )
        except BaseException:
            # the caller gets no object to close, so end the child here
            ending.signal_groups({self.pid}, signal.SIGKILL)
            self.wait()
            raise

    @property
    def pid(self) -> int:
        """Id of the process and of its process group."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code, negative for a signal; None while the process runs."""
        return self._process.poll()

    def wait(self, seconds: float | None = None) -> int:
        """Wait for the process to end and return its exit code; raises TimeoutExpired after `seconds`."""
        return self._process.wait(seconds)

    def groups(self) -> set[int]:
        """Ids of the process's group and, while it runs, of the groups of all its descendants."""
        running = ending.with_all_below(self.pid) if self.exit_code is None else set()
        return {self.pid, *(each.group for each in running)}

    def terminate(self, seconds: float) -> None:
        """Send SIGTERM to the process; after `seconds`, kill it and its descendants if they still run."""
        groups = self.groups()
        try:
            self._process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self.wait(seconds)
        finally:
            # also when a second Ctrl-C interrupts the wait
            self.close(groups)

    def kill(self, others: Set[int] = frozenset()) -> set[int]:
        """Kill the process, its descendants and the process groups `others`; returns the ids of all these groups."""
        with self._watcher:  # leaving the block closes its stdin and waits for it
            self._watcher.kill()
        groups = self.groups() | others
        if self.exit_code is not None and any(each.pid == self.pid for each in ending.running()):
            # another process has this id now: the kernel reuses an id once its group has no members
            groups.discard(self.pid)
        ending.signal_groups(groups, signal.SIGKILL)
        return groups

    def close(self, others: Set[int] = frozenset()) -> None:
        """Kill the process, its descendants and the process groups `others`, and wait until they are gone."""
        groups = self.kill(others)
        self.wait()
        ending.wait_until_gone(groups, ending.CLOSE_SECONDS)


@dataclass(frozen=True, slots=True)
class LogFile:
    """A file with the output of a child process."""

    path: Path

    def last_words(self) -> str:
        """The last line that names an exception, else the last line."""
        try:
            log = self.path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return "it was closed"
        lines = [line.strip() for line in log.splitlines()]
        named = [line for line in lines if line.split(":")[0].endswith(("Error", "Exception"))]
        return (named or [line for line in lines if line] or ["no output"])[-1][:300]

    def keep(self) -> str:
        """Copy the log to a folder that outlives the child; returns the path of the copy."""
        descriptor, name = mkstemp(prefix="fovea-engine-", suffix=".log", dir=os.environ.get(KEPT_LOGS))
        os.close(descriptor)
        with suppress(OSError):
            shutil.copyfile(self.path, name)
        return name


def kept_logs() -> str:
    """The folder where children of this process keep logs that outlive them."""
    return os.environ.get(KEPT_LOGS, gettempdir())
