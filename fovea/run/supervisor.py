"""The supervisor restarts a run when it dies (`max_restarts`): a small process, without torch, that trains in a child.

A run on Ray is supervised without restarts too, since Ray's library silently ends a process with code 1 when one of its
servers is lost.

The child runs the same command with the run folder written out. It is started again, with resume=auto, after a death
that a new process may survive (`CAUSES`, and signals such as SIGKILL, SIGSEGV or SIGBUS), but not after an error in
settings, data or code, nor if somebody asked for the end. A new checkpoint restores all restarts.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import NamedTuple

from fovea.config.run import Config
from fovea.errors import MicrobatchMemoryError
from fovea.run.lock import was_left_by
from fovea.run.run_dir import delete_unless_begun, make_folder, newest_step
from fovea.run.signals import ENDING, handling
from fovea.utils.torchrun import num_processes
from fovea_gym.errors import ClusterError, ConfigError, OutOfMemoryError
from fovea_gym.utils.launch import module_command, signal_at_end_of_parent, with_this_fovea

CAUSES = {
    ClusterError.exit_code: "a worker process failed",
    OutOfMemoryError.exit_code: "memory ran out",
    MicrobatchMemoryError.exit_code: "memory ran out in a micro-batch",
}
"""Exit codes after which a run is started again, each with the cause for messages."""


def is_supervised(config: Config) -> bool:
    """True if a run trains in a child process of its command."""
    on_ray = config.cluster.gpus_per_node is not None and num_processes() == 1
    return bool(config.max_restarts) or on_ray


def supervise(config: Config, words: Sequence[str]) -> int:
    """Train in a child process, `fovea train` with these words, and restart it when it dies; returns the exit code."""
    if num_processes() > 1:
        raise ConfigError(
            f"max_restarts={config.max_restarts} is set under torchrun, which restarts all processes itself; set "
            "max_restarts=0, a fixed run_dir and resume=auto, and give torchrun --max-restarts"
        )
    folder, is_new = make_folder(config)
    try:
        return _train(Restarts(config, folder), words)
    finally:
        if is_new:
            delete_unless_begun(folder)


def _train(restarts: Restarts, words: Sequence[str]) -> int:
    command = [*module_command("fovea"), "train", f"--supervised-by={os.getpid()}", *words]
    with Child().receiving_signals() as child:
        while True:
            code = child.run([*command, *restarts.words()])
            cause = cause_of_death(code)
            if cause is None and code >= 0 and was_left_by(child.pid, restarts.folder):
                cause = f"a library ended the process with code {code}, as Ray does when its raylet has ended"
                code = ClusterError.exit_code
            if cause is None or child.was_signalled:
                return _exit_code(code)
            restarts.count()
            if restarts.refusal:
                _say(f"{cause}, and {restarts.refusal}; resume=auto continues from {restarts.place}")
                return _exit_code(code)
            _say(f"{cause}: starting again from {restarts.place}; {restarts.left} restarts left until a new checkpoint")


def cause_of_death(code: int) -> str | None:
    """Why a process that ended with this code, negative for a signal, may be started again; None if it may not."""
    if code >= 0:
        return CAUSES.get(code)
    # not for a signal by which somebody asked for the end, before the run had handlers for it
    return None if -code in ENDING else f"killed by signal {-code} ({signal.strsignal(-code)})"


class Written(NamedTuple):
    """A checkpoint and its time: a run that went back to an earlier step writes the later checkpoints a second time."""

    time_ns: int
    step: int
    """-1: there is no checkpoint."""


def newest_written(folder: Path) -> Written:
    """The checkpoint with the highest step in the folder of a run."""
    step = newest_step(folder)
    return Written((folder / "checkpoints" / f"step-{step}").stat().st_mtime_ns if step >= 0 else 0, step)


class Restarts:
    """The restarts that a run has left, and the arguments of the next attempt."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.config, self.folder, self.left = config, folder, config.max_restarts
        self.newest = self._first = newest_written(folder)
        """Newest checkpoint when the process last died."""
        self._started = monotonic()

    def count(self) -> None:
        """Count one restart."""
        newest = newest_written(self.folder)
        if newest > self.newest:
            self.left = self.config.max_restarts
        self.left, self.newest = self.left - 1, newest

    @property
    def refusal(self) -> str:
        """Why there is no further attempt; empty if there is one."""
        if not self.config.max_restarts:
            return "max_restarts=0 allows no restart"
        if self.left < 0:
            return f"max_restarts={self.config.max_restarts} is used up without a new checkpoint"
        hours = self.config.max_hours
        return f"max_hours={hours:g} is reached" if hours is not None and self._spent_seconds >= 3600 * hours else ""

    @property
    def place(self) -> str:
        """The checkpoint from which the next attempt continues, for messages."""
        return f"the checkpoint of step {self.newest.step}" if self.newest.step >= 0 else "the beginning"

    def words(self) -> list[str]:
        """Command-line words of the next attempt that come in addition to the user's."""
        words = [f"--spent-seconds={self._spent_seconds:.3f}", f"run_dir={json.dumps(str(self.folder))}"]
        # before its first new checkpoint, the folder may hold another run, which the attempt has yet to report, or
        # checkpoints later than the one that the user named
        if self.newest != self._first:
            words.append("resume=auto")
        return words

    @property
    def _spent_seconds(self) -> float:
        return monotonic() - self._started


class Child:
    """The process of the current attempt, to which the parent passes signals on."""

    def __init__(self) -> None:
        self.was_signalled = False
        self.pid = 0
        """Id of the last process that ended."""
        self._process: subprocess.Popen[bytes] | None = None
        self._unsent: list[int] = []

    def run(self, command: Sequence[str]) -> int:
        """Run a command to its end; returns its exit code, negative for a signal. Kills all processes that it left."""
        # a separate session, so that signals that a terminal or launcher sends to the whole group arrive once
        self._process = subprocess.Popen(command, start_new_session=True, env=with_this_fovea(os.environ))
        self._send()
        code = self._process.wait()
        # a signal that arrives before the next process starts is meant for that one
        self.pid, self._process = self._process.pid, None
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        if code < 0 and sys.stdout.isatty():
            sys.stdout.write("\x1b[?25h")  # show the cursor, which a live display that was killed has hidden
        return code

    @contextmanager
    def receiving_signals(self) -> Iterator[Child]:
        """Pass on the signals that end a run within the block, and stop and continue the child with this process."""
        # an ignored signal stays ignored, also in the child
        with handling(dict.fromkeys(ENDING, self._pass_on) | {signal.SIGTSTP: self._suspend}):
            yield self

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        self.was_signalled = True
        self._unsent.append(number)
        self._send()

    def _send(self) -> None:
        """Send the signals that have arrived, also while the process was being started."""
        while self._process is not None and self._unsent:
            self._process.send_signal(self._unsent.pop(0))

    def _suspend(self, _number: int, _frame: FrameType | None) -> None:
        group = None if self._process is None else self._process.pid
        if group is not None:
            os.killpg(group, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        if group is not None:
            os.killpg(group, signal.SIGCONT)


def end_with(supervisor: int) -> None:
    """Make this process end as by SIGTERM, after its step is saved, when its supervisor, the parent, is killed."""
    signal_at_end_of_parent(signal.SIGTERM)
    if os.getppid() != supervisor:
        raise SystemExit(128 + signal.SIGTERM)


def _exit_code(code: int) -> int:
    return code if code >= 0 else 128 - code


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
