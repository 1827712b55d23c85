"""A process that serves calls and holds no engine: `processes.engine_process` starts it in tests.

`python -m tests.rollout.fake_calls_host STAGE ...` stays for ever at a stage: before it listens to the trainer
("importing"), before it is ready ("starting"), or never ("serving").
"""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import subprocess
import sys
import time
from threading import Lock
from typing import Any

from fovea.errors import LostEngineError
from fovea.processes.engine_process import EngineProcess, Limits
from fovea.processes.serving import begin, serve_parent

BEGUN = "begun"
"""In the log once the process stays where it is."""


class Unreadable:
    """Can be pickled, and nobody can read it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return importlib.import_module, ("nowhere_to_be_found",)


class Target:
    """What a test may call."""

    async def environment(self) -> dict[str, str]:
        return dict(os.environ)

    async def for_ever(self) -> None:
        await asyncio.Event().wait()

    async def echo(self, value: Any) -> Any:
        return value

    async def unreadable(self) -> Unreadable:
        return Unreadable()

    async def unpicklable(self) -> Any:
        return Lock()

    async def die_after_a_fork(self) -> None:
        """A child that is forked holds the pipe, and knows nothing of it."""
        if os.fork() == 0:
            time.sleep(600)
        os.kill(os.getpid(), signal.SIGKILL)

    async def lose_another(self) -> str:
        """What is said of an engine process that this one has started, as for SGLang."""
        try:
            EngineProcess("another", [sys.executable, "-c", "raise ValueError"], {}, Limits(**LIMITS))
        except LostEngineError as error:
            return str(error)
        raise AssertionError("it has started")

    async def close(self) -> None: ...


LIMITS = {"start_seconds": 600.0, "timeout_seconds": 600.0}


def stay() -> None:
    """Have a process in this one's group, and one in a separate group, and wait for the end."""
    subprocess.Popen(["sleep", "601"])
    subprocess.Popen(["sleep", "602"], start_new_session=True)
    print(BEGUN, flush=True)


if __name__ == "__main__":
    stage, *arguments = sys.argv[1:]
    if stage == "importing":
        print(BEGUN, flush=True)
        time.sleep(3)
    pipe, _ = begin(int(arguments[0]))
    if stage != "serving":
        stay()
        time.sleep(600)
    subprocess.Popen(["sleep", "600"])
    print(BEGUN, flush=True)
    asyncio.run(serve_parent(Target(), pipe))
