"""A process with an engine that draws nothing but what it is asked: `rollout.engine_process` starts it in tests."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from fovea.build.other_environment import Served
from fovea.errors import EngineError
from fovea.rollout.engine_host import Calls, begin
from fovea.rollout.readiness import check_idle
from fovea.types import Completion, Request, Shape
from fovea.utils.event_loop import wait_for

FOR_EVER, DEADLY, STRANGE = "for ever", "deadly", "strange"
"""Ids of requests that are answered by nothing, by the end of the process, and by an error that is not Fovea's."""


class FakeEngine:
    """Answers a request with the sums of the weights that it has."""

    name = "fake"

    def __init__(self) -> None:
        self._sums: list[float] = []
        self._version: int | None = None
        self._num_running = 0

    async def generate(self, request: Request) -> Sequence[Completion]:
        self._num_running += 1
        try:
            return [await self._completion(request)]
        finally:
            self._num_running -= 1

    async def _completion(self, request: Request) -> Completion:
        if request.id == FOR_EVER:
            await asyncio.Event().wait()
        if request.id == DEADLY:
            print("ValueError: last words", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if request.id == STRANGE:
            raise KeyError("nowhere")
        sums_T = np.array(self._sums, dtype=np.float32)
        version = -1 if self._version is None else self._version
        return Completion(
            id=request.id,
            token_ids_T=np.arange(len(sums_T)),
            logprobs_T=sums_T,
            text="",
            finish="stop",
            version=version,
        )

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...

    async def close(self) -> None: ...

    @property
    def has_weights(self) -> bool:
        return self._version is not None

    def begin_push(self, shapes: Mapping[str, Shape]) -> None:
        check_idle("new weights came", self._num_running)
        if "unknown" in shapes:
            raise EngineError("no such weight")
        self._sums = []

    def take_weights(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        self._sums += [float(tensor.sum()) for _, tensor in bucket]

    def finish_push(self, version: int) -> None:
        self._version = version


if __name__ == "__main__":
    pipe, _ = begin(sys.argv[1:])
    wait_for(Calls(Served(FakeEngine()), pipe).serve())
