"""A process with an engine that draws nothing but what it is asked: `processes.engine_process` starts it in tests."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from fovea.errors import EngineError
from fovea.rollout.server import check_idle
from fovea.types import Completion, Request, Shape
from fovea.wiring.other_environment import main
from tests.records import completion_of

FOR_EVER, DEADLY, STRANGE = "for ever", "deadly", "strange"
"""Ids of requests that are answered by nothing, by the end of the process, and by an error that is not Fovea's."""
ENVIRONMENT = "environment"
"""Id of a request whose completion has the variables of the process as its text, in JSON."""
KEPT = "kept"
"""Id of a request whose completion has as its text how many tasks, requests and completions the process holds."""
AFTER = "after"
"""Begin of the ids of requests that are answered after so many seconds, such as `after 2`."""
CLOSED = "closed"
"""Key of the first message: a file that is there once the engine was closed."""
FORGETTING_SECONDS = 0.3
"""How long a request that was aborted is still a running one, as where a batch has to be emptied of it."""


class FakeEngine:
    """Answers a request with the sums of the weights that it has."""

    name = "fake"

    def __init__(self, sent: Mapping[str, Any]) -> None:
        self._closed = sent.get(CLOSED)
        self._sums: list[float] = []
        self._version: int | None = None
        self._num_running = 0
        self._is_asleep = False

    async def generate(self, request: Request) -> Sequence[Completion]:
        if self._is_asleep:
            raise EngineError("asleep; call wake first")
        self._num_running += 1
        try:
            return [await self._completion(request)]
        finally:
            self._num_running -= 1

    async def _completion(self, request: Request) -> Completion:
        if request.id == FOR_EVER:
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(FORGETTING_SECONDS)
        if request.id.startswith(AFTER):
            await asyncio.sleep(float(request.id.removeprefix(AFTER)))
        if request.id == DEADLY:
            print("ValueError: last words\nand what came of it", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if request.id == STRANGE:
            raise KeyError("nowhere")
        texts = {
            ENVIRONMENT: lambda: json.dumps(dict(os.environ)),
            KEPT: lambda: str(sum(isinstance(each, asyncio.Task | Request | Completion) for each in gc.get_objects())),
        }
        sums_T = np.array(self._sums, dtype=np.float32)
        version = -1 if self._version is None else self._version
        text = texts[request.id]() if request.id in texts else ""
        return completion_of(range(len(sums_T)), id=request.id, logprobs_T=sums_T, text=text, version=version)

    async def sleep(self) -> None:
        check_idle("sleep was called", self._num_running)
        self._is_asleep = True

    async def wake(self) -> None:
        self._is_asleep = False

    async def close(self) -> None:
        if self._closed is not None:
            Path(self._closed).touch()

    @property
    def has_weights(self) -> bool:
        return self._version is not None

    def begin_sync(self, shapes: Mapping[str, Shape]) -> None:
        check_idle("new weights arrived", self._num_running)
        if "unknown" in shapes:
            raise EngineError("no such weight")
        self._sums = []

    def receive_weights(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        self._sums += [float(tensor.sum()) for _, tensor in bucket]

    def finish_sync(self, version: int) -> None:
        self._version = version


def make(sent: Mapping[str, Any]) -> FakeEngine:
    """The engine, and a separate process, which has every open file that a process may hand on."""
    subprocess.Popen(["sleep", "600"], close_fds=False)
    return FakeEngine(sent)


if __name__ == "__main__":
    main(sys.argv[1:], make)
