"""A server as a child process: started, waited for until it answers, and ended with all that it started."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from time import monotonic, sleep
from types import FrameType
from typing import NoReturn

import httpx2

from fovea.errors import EngineError
from fovea.rollout.server import Launch

ENDING_SECONDS = 20.0
POLL_SECONDS = 0.2
END_GROUP = f"""
read _
kill -TERM -"$0"
for _ in $(seq {10 * ENDING_SECONDS:.0f}); do kill -0 -"$0" || exit; sleep 0.1; done
kill -KILL -"$0"
"""
"""Shell commands that wait at a pipe, whose other end no process has but this one, and then end a process group.

It has time to delete its shared memory, which stays in /dev/shm otherwise.
"""


@contextmanager
def running(launch: Launch, ending_seconds: float = ENDING_SECONDS) -> Iterator[subprocess.Popen[bytes]]:
    """A process for the block. At its end, by SIGTERM and SIGKILL too, nothing of the process's group is left.

    It has `ending_seconds` to finish what it does.
    """
    with _terminable():
        # a session of its own: Ctrl-C reaches this process alone, which then ends the server
        process = subprocess.Popen(launch.command, env=dict(launch.environment), start_new_session=True)
        try:
            with _ending_with_this_one(process.pid):
                yield process
        finally:
            _end(process, ending_seconds)


@contextmanager
def _ending_with_this_one(group: int) -> Iterator[None]:
    """A block during which a process group is ended when this process is killed, which has no time to do so itself."""
    # with a session of its own, out of reach of Ctrl-C
    waiting = subprocess.Popen(
        ["/bin/sh", "-c", END_GROUP, str(group)],
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        # before the pipe is closed: by then the group's number may be another's
        waiting.kill()
        waiting.communicate()


def wait_until_healthy(process: subprocess.Popen[bytes], url: str, max_seconds: float) -> None:
    """Return when the server at `url` answers; EngineError when it ends before that, or takes too long."""
    deadline = monotonic() + max_seconds
    while process.poll() is None:
        with suppress(httpx2.HTTPError):
            if httpx2.get(f"{url}/health", timeout=2.0, trust_env=False).status_code == httpx2.codes.OK:
                return
        if monotonic() > deadline:
            raise EngineError(f"the server does not answer after {max_seconds:g} s; raise --start-seconds")
        sleep(POLL_SECONDS)
    raise EngineError(f"the server ended with code {process.returncode} before it answered; its own messages say why")


def _end(process: subprocess.Popen[bytes], seconds: float) -> None:
    """End a process and its group, at first with time to finish."""
    try:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
    finally:
        # also where a second Ctrl-C cuts that time short
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def _terminable() -> Iterator[None]:
    """A block that SIGTERM and SIGHUP leave as Ctrl-C does."""
    before = {number: signal.signal(number, _interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt(signal.strsignal(number))
